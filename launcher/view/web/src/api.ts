// Where the page's data comes from: the server, or the report file that the page itself stands in.

import { useEffect, useRef, useState } from "preact/hooks";
import { embedded } from "./embedded";
import type { Change } from "./types";

const report = document.getElementById("report");
const fromReport = report ? embedded(JSON.parse(report.textContent ?? "")) : null;

export const live = fromReport === null;

export async function get<T>(path: string): Promise<T> {
  if (fromReport) return fromReport(path) as T;
  const answer = await fetch(`/api/${path}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `${answer.status}`);
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
}

// Loads `path`, and again whenever `again` changes; the old value stays until the new one is there.
export function useLoaded<T>(path: string | null, again: unknown = null): Loaded<T> {
  const [state, setState] = useState<Loaded<T> & { path: string | null }>({ value: undefined, error: "", path: null });
  useEffect(() => {
    let current = path !== null;
    if (path === null) return;
    get<T>(path).then(
      (value) => current && setState({ value, error: "", path }),
      (error: Error) => current && setState((old) => ({ ...old, error: error.message, path })),
    );
    return () => {
      current = false;
    };
  }, [path, again]);
  return { value: state.value, error: state.path === path ? state.error : "" };
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
