// Numbers, times and hostile text as they are shown.

import type { ComponentChildren } from "preact";

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e12) return value.toLocaleString("en");
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, `${Math.trunc(size)}`.length) });
}

export function signed(value: number): string {
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + number(Math.abs(value));
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return "< 1 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 120 ? `${number(value)} s` : `${Math.round(value / 60)} min`;
}

// A long time, such as 3 h 20 min.
export function lasted(value: number): string {
  const minutes = Math.floor(value / 60);
  if (minutes < 2) return seconds(value);
  const hours = Math.floor(minutes / 60);
  if (!hours) return `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// Characters that a reader would not see, or that change the direction of what follows.
// The selector that makes an emoji of a sign before it is none of them.
const HIDDEN = /(?!\ufe0f)[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\ufff9-\ufffc\p{Default_Ignorable_Code_Point}]|(?<!\p{Extended_Pictographic})\ufe0f/gu;

// U+FFFC stands where a message shows an image.
const NAMES: Record<number, string> = { 27: "ESC", 0xfffc: "image" };

// Text of any origin, with hidden characters spelled out.
export function visible(text: string): ComponentChildren {
  const parts: ComponentChildren[] = [];
  let shown = 0;
  for (const { 0: character, index } of text.matchAll(HIDDEN)) {
    const code = character.codePointAt(0)!;
    parts.push(text.slice(shown, index), <span class="hidden-character">{NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`}</span>);
    shown = index + character.length;
  }
  return parts.length ? [...parts, text.slice(shown)] : text;
}

// The text of one token for a label: spaces and line breaks are shown too.
export function tokenLabel(text: string | null, id: number): string {
  if (text === null) return `#${id}`;
  if (text === "") return "(part of a character)";
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

export function toolArguments(text: string): string {
  try {
    const value = JSON.parse(text);
    const inner = typeof value.arguments === "object" && value.arguments ? value.arguments : value;
    return Object.entries(inner).map(([name, one]) => `${name}=${typeof one === "string" ? one : JSON.stringify(one)}`).join(", ");
  } catch {
    return text;
  }
}
