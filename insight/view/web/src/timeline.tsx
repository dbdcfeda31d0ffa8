// The timeline: lanes of what each process did when, on a canvas that one can zoom and walk through with the keyboard.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, parameters, run as runPath, useKeys } from "./api";
import { number, seconds, visible } from "./format";
import { address } from "./place";
import { type Drawn, draw, under } from "./drawing";
import { type Lane, type Span, type Timeline, KINDS, asSpan } from "./lanes";

const AGAIN_MS = 2000;
const SHORTEST_S = 0.01;

interface Window {
  from: number;
  to: number;
}

export function TimelineView({ name, running }: { name: string; running: boolean }) {
  const [wanted, setWanted] = useState<Window | null>(null); // null: the newest steps, as they come
  const [found, setFound] = useState<Timeline | null>(null);
  const [error, setError] = useState("");
  const [chosen, setChosen] = useState<Span | null>(null);
  const [tick, setTick] = useState(0);
  const asked = useRef(0);
  useEffect(() => {
    const timer = running ? setInterval(() => !document.hidden && setTick((old) => old + 1), AGAIN_MS) : undefined;
    return () => clearInterval(timer);
  }, [running]);
  useEffect(() => {
    const number = ++asked.current;
    const load = () =>
      get<Timeline>(`${runPath(name)}/timeline?${parameters({ from: wanted?.from, to: wanted?.to })}`).then(
        (value) => number === asked.current && (setFound(value), setError("")),
        (problem: Error) => number === asked.current && setError(problem.message),
      );
    const timer = setTimeout(load, wanted ? 120 : 0);
    return () => clearTimeout(timer);
  }, [name, wanted?.from, wanted?.to, wanted && found && wanted.to < found.until ? 0 : tick]);
  const shown: Window | null = wanted ?? found;
  const move = (from: number, to: number) => {
    if (!found) return;
    const length = Math.max(SHORTEST_S, Math.min(to - from, 1.1 * (found.until - found.began) + 1));
    const begin = Math.min(Math.max(from, found.began - 0.05 * length), found.until - 0.5 * length);
    setWanted({ from: begin, to: begin + length });
  };
  const zoom = (factor: number, at = 0.5) => {
    if (!shown) return;
    const length = (shown.to - shown.from) * factor;
    const fixed = shown.from + at * (shown.to - shown.from);
    move(fixed - at * length, fixed + (1 - at) * length);
  };
  const pan = (share: number) => shown && move(shown.from + share * (shown.to - shown.from), shown.to + share * (shown.to - shown.from));
  const all = () => found && move(found.began, found.until);
  const step = (by: number) => {
    if (!found || !shown) return;
    const next = neighbour(found.lanes, chosen, by, shown);
    if (!next) return;
    setChosen(next);
    if (next.began < shown.from || next.ended > shown.to) {
      const length = shown.to - shown.from;
      move(next.began - 0.3 * length, next.began + 0.7 * length);
    }
  };
  useKeys((key) => {
    if (key === "+" || key === "=") zoom(0.5);
    else if (key === "-") zoom(2);
    else if (key === "ArrowLeft") pan(-0.25);
    else if (key === "ArrowRight") pan(0.25);
    else if (key === "0") all();
    else if (key === "f") setWanted(null);
    else if (key === "j") step(1);
    else if (key === "k") step(-1);
    else if (key === "Escape") setChosen(null);
    else if (key === "Enter" && chosen?.key) location.hash = address({ page: "trajectory", run: name, key: chosen.key });
  });
  if (error) return <p class="problem">{error}</p>;
  if (!found || !shown) return <p class="quiet">Reading the timeline …</p>;
  if (!found.lanes.length && !found.steps.length) return <p class="quiet">Nothing of this run's time was recorded.</p>;
  const kinds = Object.keys(KINDS).filter((kind) => found.lanes.some((lane) => lane.rows.some((row) => row.some((span) => span[2] === kind))));
  return (
    <section class="timeline" aria-label="timeline">
      <div class="bar">
        <h2>timeline</h2>
        <span class="buttons">
          <button onClick={() => pan(-0.5)} aria-label="earlier">←</button>
          <button onClick={() => pan(0.5)} aria-label="later">→</button>
          <button onClick={() => zoom(2)} aria-label="zoom out">−</button>
          <button onClick={() => zoom(0.5)} aria-label="zoom in">+</button>
          <button onClick={all}>all</button>
          <button onClick={() => setWanted(null)} aria-pressed={wanted === null}>newest</button>
        </span>
        <span class="legend">{kinds.map((kind) => <span key={kind}><i class={`patch kind-${kind}`} /> {KINDS[kind]}</span>)}</span>
      </div>
      <Canvas found={found} window={shown} chosen={chosen} onChoose={setChosen} onMove={move} onZoom={zoom} />
      <Note found={found} />
      {chosen && <Story span={chosen} name={name} found={found} />}
    </section>
  );
}

function Note({ found }: { found: Timeline }) {
  const notes = [
    !found.detailed && "answers, tool calls and rewards appear when you zoom in",
    found.left_out > 0 && `${number(found.left_out)} spans of episodes are not shown; rl-async trace has them all`,
  ].filter(Boolean);
  return notes.length ? <p class="quiet">{notes.join("; ")}</p> : null;
}

function Canvas({ found, window: shown, chosen, onChoose, onMove, onZoom }: {
  found: Timeline;
  window: Window;
  chosen: Span | null;
  onChoose: (span: Span | null) => void;
  onMove: (from: number, to: number) => void;
  onZoom: (factor: number, at: number) => void;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const drawn = useRef<Drawn | null>(null);
  const [width, setWidth] = useState(0);
  const latest = useRef({ shown, onMove, onZoom });
  latest.current = { shown, onMove, onZoom };
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const element = canvas.current!.parentElement!;
    const resized = new ResizeObserver(() => setWidth(element.clientWidth));
    resized.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => setTheme((old) => old + 1);
    dark.addEventListener("change", redraw);
    return () => (resized.disconnect(), dark.removeEventListener("change", redraw));
  }, []);
  useEffect(() => {
    if (width) drawn.current = draw(canvas.current!, width, found, shown.from, shown.to, chosen);
  }, [width, found, shown.from, shown.to, chosen, theme]);
  useEffect(() => {
    const element = canvas.current!;
    const wheel = (event: WheelEvent) => {
      const box = element.getBoundingClientRect();
      const { shown, onMove, onZoom } = latest.current;
      if (event.ctrlKey || event.metaKey) onZoom(Math.exp(event.deltaY / 200), (event.clientX - box.left) / box.width);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        const by = ((event.deltaX || event.deltaY) / box.width) * (shown.to - shown.from);
        onMove(shown.from + by, shown.to + by);
      } else return;
      event.preventDefault();
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, []);
  const pointers = usePointers(canvas, latest, (x, y) => onChoose(drawn.current ? under(drawn.current, x, y) : null));
  const said = useMemo(() => summary(found), [found]);
  return (
    <div class="canvas">
      <canvas ref={canvas} tabIndex={0} role="img" aria-label={said} {...pointers} data-spans={count(found)} />
    </div>
  );
}

// Dragging moves, two fingers zoom, a click chooses.
function usePointers(
  canvas: { current: HTMLCanvasElement | null },
  latest: { current: { shown: Window; onMove: (from: number, to: number) => void } },
  click: (x: number, y: number) => void,
) {
  const down = useRef(new Map<number, number>());
  const held = useRef({ from: 0, to: 0, moved: false });
  const at = (event: PointerEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top, width: box.width };
  };
  const hold = () => (held.current = { from: latest.current.shown.from, to: latest.current.shown.to, moved: held.current.moved });
  const begun = useRef(new Map<number, number>());
  return {
    onPointerDown: (event: PointerEvent) => {
      if (!down.current.size) held.current.moved = false;
      down.current.set(event.pointerId, at(event).x);
      begun.current = new Map(down.current);
      hold();
    },
    onPointerMove: (event: PointerEvent) => {
      if (!down.current.has(event.pointerId)) return;
      const { x, width } = at(event);
      down.current.set(event.pointerId, x);
      const { from, to } = held.current;
      const ids = [...down.current.keys()].slice(0, 2);
      const before = ids.map((id) => begun.current.get(id)!);
      const now = ids.map((id) => down.current.get(id)!);
      if (!held.current.moved && Math.abs(x - begun.current.get(event.pointerId)!) < 4) return;
      if (!held.current.moved) canvas.current!.setPointerCapture(event.pointerId);
      held.current.moved = true;
      const scale = ids.length < 2 ? 1 : Math.max(20, Math.abs(before[1]! - before[0]!)) / Math.max(20, Math.abs(now[1]! - now[0]!));
      const fixed = from + (before[0]! / width) * (to - from);
      const begin = fixed - (now[0]! / width) * (to - from) * scale;
      latest.current.onMove(begin, begin + (to - from) * scale);
    },
    onPointerUp: (event: PointerEvent) => {
      const { x, y } = at(event);
      if (down.current.delete(event.pointerId) && !held.current.moved) click(x, y);
      begun.current = new Map(down.current);
      hold();
    },
    onPointerCancel: (event: PointerEvent) => void down.current.delete(event.pointerId),
  };
}

function Story({ span, name, found }: { span: Span; name: string; found: Timeline }) {
  const where = found.lanes.find((lane) => lane.rows.some((row) => row.some((other) => same(asSpan(other, lane), span))));
  return (
    <div class="span-story" aria-live="polite">
      <i class={`patch kind-${span.kind}`} />
      <b>{visible(span.name)}</b>
      <span>{KINDS[span.kind]}, {span.process}{where && where.title !== "phase" ? `, ${where.title}` : ""}</span>
      <span class="figure">{seconds(span.ended - span.began)}</span>
      <span class="quiet">from {clock(span.began - found.began)} after the start, {new Date(span.began * 1000).toLocaleTimeString()}</span>
      {span.step >= 0 && <span>{span.about === "held out" ? "evaluation of version" : "step"} {span.step}</span>}
      {span.about && span.about !== "held out" && <span class="quiet">{visible(span.about)}</span>}
      {span.key && <a href={address({ page: "trajectory", run: name, key: span.key })}>trajectory</a>}
    </div>
  );
}

export function clock(value: number): string {
  const sign = value < 0 ? "−" : "";
  const size = Math.abs(value);
  const [minutes, rest] = [Math.floor(size / 60), size % 60];
  const digits = size < 10 ? 2 : size < 120 ? 1 : 0;
  return minutes ? `${sign}${minutes}:${rest.toFixed(digits).padStart(digits ? digits + 3 : 2, "0")}` : `${sign}${rest.toFixed(digits)} s`;
}

const same = (one: Span, other: Span) => one.began === other.began && one.process === other.process && one.name === other.name;
const count = (found: Timeline) => found.lanes.reduce((sum, lane) => sum + lane.rows.reduce((all, row) => all + row.length, 0), 0);

// The next span in time of the chosen one's kind, or the first one that is shown.
function neighbour(lanes: Lane[], chosen: Span | null, by: number, shown: Window): Span | null {
  const spans = lanes.flatMap((lane) => lane.rows.flatMap((row) => row.map((one) => asSpan(one, lane))));
  if (!chosen) return spans.find((span) => span.ended > shown.from && span.kind === "train") ?? spans[0] ?? null;
  const alike = spans.filter((span) => span.process === chosen.process && span.kind === chosen.kind).sort((a, b) => a.began - b.began);
  const place = alike.findIndex((span) => same(span, chosen));
  return alike[place + by] ?? null;
}

function summary(found: Timeline): string {
  const took: Record<string, number> = {};
  for (const lane of found.lanes)
    for (const row of lane.rows) for (const one of row) took[`${lane.process} ${KINDS[one[2]]}`] = (took[`${lane.process} ${KINDS[one[2]]}`] ?? 0) + one[1] - one[0];
  return Object.entries(took).map(([what, time]) => `${what}: ${seconds(time)}`).join("; ");
}
