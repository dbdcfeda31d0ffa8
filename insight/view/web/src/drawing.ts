// Draws lanes on a canvas, and knows what is under a point of it.

import { type Lane, type Recorded, type Span, type Timeline, asSpan } from "./lanes";

const AXIS = 22;
const LABEL = 15;
const GAP = 6;
const ROW = 18; // of a lane that is one row
const MOST = 120; // of a lane of many
const LEAST_ROW = 1;
const LINES = 12; // from the episodes that a batch got last

interface Place {
  lane: Lane;
  top: number;
  height: number; // of a row
}

export interface Drawn {
  places: Place[];
  from: number;
  to: number;
  width: number;
}

export function draw(canvas: HTMLCanvasElement, width: number, found: Timeline, from: number, to: number, chosen: Span | null): Drawn {
  const places = layout(found.lanes);
  const last = places.at(-1);
  const height = last ? last.top + last.height * last.lane.rows.length + GAP : AXIS;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d")!;
  pen.scale(ratio, ratio);
  const styles = getComputedStyle(document.documentElement);
  const colour = (name: string) => styles.getPropertyValue(`--${name}`).trim();
  const x = (at: number) => ((at - from) / (to - from)) * width;
  const colours = new Map<string, string>();
  const ofKind = (kind: string) => colours.get(kind) ?? (colours.set(kind, colour(`kind-${kind}`)), colours.get(kind)!);
  axis(pen, found, from, to, width, height, x, colour);
  for (const { lane, top, height: row } of places) {
    label(pen, `${lane.process} ${lane.title === "phase" ? "" : lane.title}`, top - 4, colour("muted"));
    lane.rows.forEach((spans, number) => {
      for (const span of visibleOf(spans, from, to)) {
        const left = Math.max(x(span[0]), -2);
        const right = Math.min(x(span[1]), width + 2);
        const fades = chosen && chosen.step >= 0 && chosen.kind !== "sync" && (span[4] !== chosen.step || span[6] !== chosen.about);
        pen.globalAlpha = fades ? 0.3 : 1;
        pen.fillStyle = ofKind(span[2]);
        const gap = row > 6 ? 1 : row > 3 ? 0.5 : 0;
        pen.fillRect(left, top + number * row, Math.max(right - left - (right - left > 3 ? 0.75 : 0), 0.75), row - gap);
        if (row >= 12 && right - left > 34) write(pen, span[2] === "train" && span[4] >= 0 ? `step ${span[4]}` : span[3], left, right, top + number * row + row / 2, colour("kind-ink"));
      }
    });
    pen.globalAlpha = 1;
  }
  if (chosen) mark(pen, places, chosen, x, colour("ink"), colour("accent"));
  return { places, from, to, width };
}

function layout(lanes: Lane[]): Place[] {
  let top = AXIS;
  return lanes.map((lane) => {
    const height = lane.rows.length === 1 ? ROW : Math.max(LEAST_ROW, Math.min(14, MOST / lane.rows.length));
    const place = { lane, top: top + LABEL, height };
    top += LABEL + height * lane.rows.length + GAP;
    return place;
  });
}

// Spans of a row are in order and do not overlap.
function visibleOf(spans: Recorded[], from: number, to: number): Recorded[] {
  const first = search(spans, (span) => span[1] >= from);
  const last = search(spans, (span) => span[0] > to);
  return spans.slice(first, last);
}

function search(spans: Recorded[], is: (span: Recorded) => boolean): number {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (is(spans[middle]!)) high = middle;
    else low = middle + 1;
  }
  return low;
}

function axis(
  pen: CanvasRenderingContext2D, found: Timeline, from: number, to: number, width: number, height: number,
  x: (at: number) => number, colour: (name: string) => string,
): void {
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const gap = nice(((to - from) * 90) / width);
  pen.fillStyle = colour("muted");
  pen.strokeStyle = colour("line");
  pen.beginPath();
  for (let tick = Math.ceil((from - found.began) / gap) * gap; tick <= to - found.began; tick += gap) {
    const at = Math.round(x(found.began + tick)) + 0.5;
    pen.moveTo(at, 0);
    pen.lineTo(at, height);
    pen.fillText(told(tick, gap), at + 3, 8);
  }
  pen.stroke();
  pen.strokeStyle = colour("muted");
  pen.setLineDash([2, 3]);
  pen.beginPath();
  for (const [, began] of found.steps) if (x(began) > 0 && (found.steps.length * 6 < width)) {
    pen.moveTo(Math.round(x(began)) + 0.5, 12);
    pen.lineTo(Math.round(x(began)) + 0.5, height);
  }
  pen.globalAlpha = 0.5;
  pen.stroke();
  pen.globalAlpha = 1;
  pen.setLineDash([]);
}

function nice(seconds: number): number {
  const size = 10 ** Math.floor(Math.log10(seconds));
  if (seconds > 20) return [30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find((one) => one >= seconds) ?? Math.ceil(seconds / 86400) * 86400;
  return [1, 2, 5, 10].map((one) => one * size).find((one) => one >= seconds * 0.999)!;
}

function told(at: number, gap: number): string {
  if (at < 0) return "";
  const digits = gap >= 1 ? 0 : Math.min(4, Math.ceil(-Math.log10(gap)));
  if (at < 60) return `${at.toFixed(digits)} s`;
  const rest = (at % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  const minutes = Math.floor(at / 60);
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${`${minutes % 60}`.padStart(2, "0")}:${rest}`;
}

function label(pen: CanvasRenderingContext2D, text: string, bottom: number, colour: string): void {
  pen.font = "600 11px system-ui, sans-serif";
  pen.textBaseline = "alphabetic";
  pen.fillStyle = colour;
  pen.fillText(text, 2, bottom);
}

function write(pen: CanvasRenderingContext2D, text: string, left: number, right: number, middle: number, colour: string): void {
  const begin = Math.max(left, 0) + 4;
  const room = right - begin - 3;
  pen.font = "11px system-ui, sans-serif";
  let shown = text.slice(0, Math.max(0, Math.floor(room / 5)));
  while (shown && pen.measureText(shown).width > room) shown = shown.slice(0, -1);
  if (shown.length < Math.min(4, text.length)) return;
  pen.textBaseline = "middle";
  pen.fillStyle = colour;
  pen.fillText(shown.length < text.length ? `${shown.slice(0, -1)}…` : shown, begin, middle + 0.5);
}

// Frames what is chosen; lines join a batch with the ends of its episodes, and an episode with its batch.
function mark(pen: CanvasRenderingContext2D, places: Place[], chosen: Span, x: (at: number) => number, ink: string, accent: string): void {
  let batch: [number, number] | null = null;
  const ends = new Map<string, [number, number, number]>();
  for (const { lane, top, height } of places)
    lane.rows.forEach((spans, number) => {
      const middle = top + (number + 0.5) * height;
      for (const recorded of spans) {
        const span = asSpan(recorded, lane);
        if (span.began === chosen.began && span.process === chosen.process && span.name === chosen.name) {
          pen.strokeStyle = ink;
          pen.lineWidth = 2;
          pen.strokeRect(x(span.began), top + number * height, Math.max(x(span.ended) - x(span.began), 2), height);
        }
        if (span.step !== chosen.step || span.step < 0) continue;
        if (span.kind === "train" && !batch) batch = [x(span.began), middle];
        if (span.key.startsWith("train-") && (ends.get(span.key)?.[0] ?? 0) < span.ended) ends.set(span.key, [span.ended, x(span.ended), middle]);
      }
    });
  if (!batch || !(chosen.kind === "train" || chosen.key.startsWith("train-"))) return;
  const end = ends.get(chosen.key); // none where the batch is drawn without the episode
  const of = chosen.kind === "train" ? [...ends.values()].sort((a, b) => b[0] - a[0]).slice(0, LINES) : end ? [end] : [];
  pen.strokeStyle = accent;
  pen.lineWidth = 1;
  pen.globalAlpha = of.length > 1 ? 0.45 : 1;
  pen.beginPath();
  for (const [, left, top] of of) {
    pen.moveTo(left, top);
    pen.bezierCurveTo(left, (top + batch[1]) / 2, batch[0], (top + batch[1]) / 2, batch[0], batch[1]);
  }
  pen.stroke();
  pen.globalAlpha = 1;
}

export function under({ places, from, to, width }: Drawn, left: number, top: number): Span | null {
  const at = from + (left / width) * (to - from);
  const slack = (3 / width) * (to - from);
  for (const place of places) {
    const number = Math.floor((top - place.top) / place.height);
    const spans = number >= 0 ? place.lane.rows[number] : undefined;
    if (!spans) continue;
    const near = visibleOf(spans, at - slack, at + slack);
    const best = near.sort((a, b) => distance(a, at) - distance(b, at))[0];
    return best ? asSpan(best, place.lane) : null;
  }
  return null;
}

const distance = ([began, ended]: Recorded, at: number) => Math.max(began - at, at - ended, 0);
