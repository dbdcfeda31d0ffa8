// Where the page's data comes from: the server, or the report file that the page itself stands in.

import { useEffect, useRef, useState } from "preact/hooks";
import { embedded } from "./embedded";
import type { Change } from "./types";

const report = document.getElementById("report");
const fromReport = report ? embedded(JSON.parse(report.textContent ?? "")) : null;

export const live = fromReport === null;

export async function get<T>(path: string): Promise<T> {
  if (fromReport) return fromReport(path) as T;
  const answer = await fetch(`/api/${path}`).catch(() => {
    throw new Error("the page's server does not answer; see whether `rl-async view` still runs");
  });
  const isJson = answer.headers.get("content-type")?.startsWith("application/json");
  const body = isJson ? await answer.json() : {};
  if (!isJson || !answer.ok) throw new Error(body.error?.message ?? `the server answered ${answer.status} to ${path.split("?")[0]}`);
  return body as T;
}

export function parameters(given: Record<string, string | number | undefined>): string {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) if (value !== undefined && value !== "") found.set(name, `${value}`);
  return found.toString();
}

export const run = (name: string) => `runs/${encodeURIComponent(name)}`;

export interface Loaded<T> {
  value: T | undefined;
  error: string;
  stale: boolean; // the value is that of another path, whose labels it must not stand under
}

// Loads `path`, and again whenever `again` changes; the old value stays until the new one is there.
export function useLoaded<T>(path: string | null, again: unknown = null): Loaded<T> {
  const [state, setState] = useState<Omit<Loaded<T>, "stale"> & { path: string | null; of: string | null }>({ value: undefined, error: "", path: null, of: null });
  useEffect(() => {
    let current = path !== null;
    if (path === null) return;
    get<T>(path).then(
      (value) => current && setState({ value, error: "", path, of: path }),
      (error: Error) => current && setState((old) => ({ ...old, error: error.message, path })),
    );
    return () => {
      current = false;
    };
  }, [path, again]);
  return { value: state.value, error: state.path === path ? state.error : "", stale: state.of !== path };
}

export interface OfRuns<T> {
  values: Record<string, T>;
  errors: Record<string, string>;
}

// Loads `what` of each of the runs, and again whenever `again` changes.
export function useOfRuns<T>(names: string[], what: string, again: unknown = null): OfRuns<T> {
  const [state, setState] = useState<OfRuns<T>>({ values: {}, errors: {} });
  useEffect(() => {
    let current = true;
    const put = (name: string, value: Partial<Record<string, T>>, error: string) =>
      current && setState((old) => ({ values: { ...old.values, ...value } as Record<string, T>, errors: { ...old.errors, [name]: error } }));
    for (const name of names)
      get<T>(`${run(name)}/${what}`).then((value) => put(name, { [name]: value }, ""), (error: Error) => put(name, {}, error.message));
    return () => {
      current = false;
    };
  }, [names.join("\n"), what, again]);
  return state;
}

// Follows what changes in the runs, by name.
export function useChanges(): Record<string, Change> {
  const [changes, setChanges] = useState<Record<string, Change>>({});
  useEffect(() => {
    if (!live) return;
    const events = new EventSource("/api/events");
    events.onmessage = (event) => {
      const change = JSON.parse(event.data) as Change;
      setChanges((old) => ({ ...old, [change.run]: change }));
    };
    return () => events.close();
  }, []);
  return changes;
}

// Calls `handle` on a key, unless it is typed into a field; Escape leaves the field.
export function useKeys(handle: (key: string, event: KeyboardEvent) => void): void {
  const latest = useRef(handle);
  latest.current = handle;
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName);
      if (typing && event.key === "Escape") target.blur();
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      latest.current(event.key, event);
    };
    document.addEventListener("keydown", listen);
    return () => document.removeEventListener("keydown", listen);
  }, []);
}
