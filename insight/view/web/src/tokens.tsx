// Tokens as text, coloured by what was recorded of them. Long texts are drawn where they are looked at.

import { memo } from "preact/compat";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { number, tokenLabel, visible } from "./format";
import type { Tokens, Turn } from "./types";

export const CHUNK = 400; // tokens that are drawn together
const FOLDED = 8; // equal tokens of an image that are shown one by one
const CLIP = 20000; // characters of a text that are shown at first

export type Property = "trained" | "weight" | "ratio" | "logprob" | "trained_logprob" | "difference" | "version" | "staleness" | "advantage" | "none";

export const PROPERTIES: Record<Property, string> = {
  trained: "what trained",
  advantage: "advantage",
  weight: "weight",
  ratio: "ratio of trainer and engine",
  difference: "difference of log-probabilities",
  logprob: "log-probability, engine",
  trained_logprob: "log-probability, trainer",
  version: "version of the weights",
  staleness: "staleness",
  none: "no colour",
};

export function valueOf(tokens: Tokens, property: Property, at: number): number | null {
  const ours = tokens.trained_logprob[at] ?? null;
  const theirs = tokens.logprob[at] ?? null;
  if ((property === "ratio" || property === "difference") && tokens.constrained[at]) return null; // of two distributions
  if (property === "ratio") return ours === null || theirs === null ? null : Math.exp(ours - theirs);
  if (property === "difference") return ours === null || theirs === null ? null : ours - theirs;
  if (property === "version") return tokens.version[at]?.[1] ?? null;
  if (property === "none" || property === "trained") return null;
  return tokens[property][at] ?? null;
}

// Whether two turns are messages of the same prompt, whose tokens the template put together.
export const sameTokens = (one: Turn, other: Turn) => one.end > one.start && one.start === other.start && one.end === other.end;

export interface Scale {
  property: Property;
  low: number;
  high: number;
}

// The range of a property over the row: symmetric about its neutral value where it has one.
export function scaleOf(tokens: Tokens, property: Property): Scale {
  let low = Infinity;
  let high = -Infinity;
  for (let at = 0; at < tokens.id.length; at++) {
    const value = valueOf(tokens, property, at);
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return { property, low: 0, high: 0 };
  const middle = property === "ratio" || property === "weight" ? 1 : 0;
  if (["advantage", "difference", "ratio", "weight"].includes(property)) {
    const reach = Math.max(Math.abs(low - middle), Math.abs(high - middle));
    return { property, low: middle - reach, high: middle + reach };
  }
  return { property, low, high };
}

// The class of a token's colour: diverging about a neutral middle, or from light to strong.
export function shade(scale: Scale, tokens: Tokens, at: number): string {
  if (tokens.version[at] === null) return "context";
  if (scale.property === "none") return "";
  if (scale.property === "trained") {
    if (tokens.rule[at]) return tokens.rule[at] === "band" ? "zeroed" : "masked";
    const weight = tokens.weight[at] ?? null;
    return weight === null ? "" : weight < 0.9 ? "lessened" : "";
  }
  const value = valueOf(tokens, scale.property, at);
  if (value === null || scale.high === scale.low) return "";
  const share = (value - scale.low) / (scale.high - scale.low);
  if (["advantage", "difference", "ratio", "weight"].includes(scale.property)) return `d${Math.round((share - 0.5) * 8)}`;
  return scale.property === "logprob" || scale.property === "trained_logprob" ? `s${Math.round((1 - share) * 6)}` : `s${Math.round(share * 6)}`;
}

export function Legend({ scale }: { scale: Scale }) {
  if (scale.property === "none") return null;
  if (scale.property === "trained")
    return (
      <span class="legend">
        <span class="token context">not sampled</span> <span class="token">trained</span> <span class="token lessened">weight below 0.9</span>{" "}
        <span class="token zeroed">weight 0 by a band</span> <span class="token masked">masked</span>
      </span>
    );
  const diverging = ["advantage", "difference", "ratio", "weight"].includes(scale.property);
  const steps = diverging ? [-4, -3, -2, -1, 0, 1, 2, 3, 4].map((n) => `d${n}`) : [0, 1, 2, 3, 4, 5, 6].map((n) => `s${n}`);
  const ends = scale.property.endsWith("logprob") ? [scale.high, scale.low] : [scale.low, scale.high];
  if (scale.low === scale.high && !diverging) return <span class="legend quiet">{number(scale.low)} everywhere</span>;
  return (
    <span class="legend">
      {number(ends[0])} {steps.map((one) => <span key={one} class={`token patch ${one}`} />)} {number(ends[1])}
    </span>
  );
}

interface SpanProps {
  tokens: Tokens;
  from: number;
  to: number;
  scale: Scale;
  chosen: number;
  choose: (at: number) => void;
}

// The end of the tokens from ``at`` on that are shown as one: an image is hundreds of equal ones, which nothing sampled.
function runEnd(tokens: Tokens, at: number, to: number): number {
  let end = at + 1;
  while (end < to && tokens.id[end] === tokens.id[at] && tokens.version[end] === null) end++;
  return end - at > FOLDED && tokens.version[at] === null ? end : at + 1;
}

// Tokens [from, to) of the row.
export function TokenText({ tokens, from, to, scale, chosen, choose }: SpanProps) {
  const chunks = useMemo(() => {
    const found: [number, number][] = [];
    for (let at = from; at < to; at += CHUNK) found.push([at, Math.min(at + CHUNK, to)]);
    return found;
  }, [from, to]);
  return (
    <div class="text tokens">
      {chunks.map(([begin, end]) => (
        <Chunk key={begin} tokens={tokens} from={begin} to={end} scale={scale} chosen={chosen >= begin && chosen < end ? chosen : -1} choose={choose} first={begin === from && from === 0} />
      ))}
    </div>
  );
}

const Chunk = memo(function Chunk({ tokens, from, to, scale, chosen, choose, first }: SpanProps & { first: boolean }) {
  const holder = useRef<HTMLSpanElement>(null);
  const [near, setNear] = useState(first);
  useEffect(() => {
    const seen = new IntersectionObserver((entries) => setNear(entries.some((entry) => entry.isIntersecting)), { rootMargin: "600px" });
    seen.observe(holder.current!);
    return () => seen.disconnect();
  }, []);
  const spans = [];
  let plain = "";
  for (let at = from, end; at < to; at = end) {
    end = runEnd(tokens, at, to);
    const text = tokens.text[at];
    const name = `token ${shade(scale, tokens, at)}${chosen >= at && chosen < end ? " chosen" : ""}`;
    const shown = (text === null ? `#${tokens.id[at]} ` : text === "" ? "·" : text) + (end > at + 1 ? `×${end - at}` : "");
    plain += shown;
    spans.push(<span key={at} class={name} data-at={at} title={tokenLabel(text ?? null, tokens.id[at]!)}>{visible(shown)}</span>);
  }
  if (!near && chosen < 0) return <span ref={holder}>{visible(plain)}</span>;
  const click = (event: MouseEvent) => {
    const at = (event.target as HTMLElement).closest<HTMLElement>("[data-at]")?.dataset.at;
    if (at !== undefined) choose(Number(at));
  };
  return <span ref={holder} onClick={click}>{spans}</span>;
});

// All tokens of the row in one strip, to see where to look; a click chooses the token there.
export function Strip({ tokens, scale, chosen, choose }: { tokens: Tokens; scale: Scale; chosen: number; choose: (at: number) => void }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const element = canvas.current!;
    const draw = () => paint(element, tokens, scale, chosen);
    draw();
    const resized = new ResizeObserver(draw);
    resized.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    return () => {
      resized.disconnect();
      dark.removeEventListener("change", draw);
    };
  }, [tokens, scale, chosen]);
  const click = (event: MouseEvent) => choose(Math.min(tokens.id.length - 1, Math.floor((event.offsetX / canvas.current!.clientWidth) * tokens.id.length)));
  return <canvas ref={canvas} class="strip" onClick={click} role="img" aria-label="all tokens of the trajectory" />;
}

function paint(element: HTMLCanvasElement, tokens: Tokens, scale: Scale, chosen: number): void {
  const style = getComputedStyle(document.documentElement);
  const ratio = devicePixelRatio || 1;
  const [width, height] = [element.clientWidth * ratio, element.clientHeight * ratio];
  if (element.width !== width || element.height !== height) [element.width, element.height] = [width, height];
  const context = element.getContext("2d")!;
  context.clearRect(0, 0, width, height);
  const count = tokens.id.length;
  const colours = new Map<string, string>();
  for (let at = 0; at < count; at++) {
    const name = shade(scale, tokens, at) || "trained";
    if (!colours.has(name)) colours.set(name, style.getPropertyValue(`--token-${name}`) || style.getPropertyValue("--token-trained"));
    context.fillStyle = colours.get(name)!;
    const rise = name === "context" ? height * 0.3 : 0;
    context.fillRect((at / count) * width, rise, Math.max(1, width / count), height - 2 * rise);
  }
  if (chosen >= 0) {
    context.fillStyle = style.getPropertyValue("--ink");
    context.fillRect(((chosen + 0.5) / count) * width - ratio, 0, 2 * ratio, height);
  }
}

// A text that nothing is known about token by token; a very long one is cut until it is wanted.
export function PlainText({ text }: { text: string }) {
  const [whole, setWhole] = useState(text.length <= CLIP);
  return (
    <div class="text">
      {visible(whole ? text : text.slice(0, CLIP))}
      {!whole && <button class="plain" onClick={() => setWhole(true)}> … show all {number(text.length)} characters</button>}
    </div>
  );
}
