// Curves: one card per metric, all runs over each other, with one cursor for all cards.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { number } from "./format";

export interface Series {
  label: string;
  colour: string; // the name of a custom property of the style sheet
  xs: number[];
  ys: (number | null)[];
  points?: boolean;
}

const style = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The moving average that W&B and TensorBoard draw: debiased, so that its beginning is not pulled to 0.
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  let last = 0;
  let count = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * weight + (1 - weight) * value;
    count += 1;
    return last / (1 - weight ** count);
  });
}

export function Chart({ title, series, height = 150, smooth = 0, log = false, missing = "not in this run yet", open }: {
  title: string;
  missing?: string;
  series: Series[];
  height?: number;
  smooth?: number;
  log?: boolean;
  open?: (step: number) => void; // called with the step that is clicked
}) {
  const latest = useRef(open);
  latest.current = open;
  const holder = useRef<HTMLDivElement>(null);
  const values = useRef<HTMLSpanElement>(null);
  const shown = series.filter((one) => one.ys.some((y) => y !== null));
  useEffect(() => {
    const element = holder.current;
    if (!element || !shown.length) return;
    const plot = draw(element, values.current!, shown, height, smooth, log);
    let pressed = 0;
    plot.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    plot.over.addEventListener("click", (event) => {
      const at = plot.cursor.idx;
      if (typeof at === "number" && Math.abs(event.clientX - pressed) < 4) latest.current?.(plot.data[0]![at]!); // no zoom
    });
    const resized = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height }));
    resized.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => plot.redraw();
    dark.addEventListener("change", redraw);
    return () => {
      dark.removeEventListener("change", redraw);
      resized.disconnect();
      plot.destroy();
    };
  }, [JSON.stringify(shown.map((one) => [one.label, one.colour, one.xs.length, one.ys.at(-1), one.ys[0]])), height, smooth, log]);
  return (
    <figure class="chart">
      <figcaption><b>{title}</b><span class="values" ref={values} /></figcaption>
      {shown.length ? <div ref={holder} style={{ height: `${height}px` }} /> : <p class="quiet">{missing}</p>}
    </figure>
  );
}

function draw(element: HTMLElement, values: HTMLElement, series: Series[], height: number, smooth: number, log: boolean): uPlot {
  const tables = series.map((one) => [one.xs, smooth ? smoothed(one.ys, smooth) : one.ys] as uPlot.AlignedData);
  if (smooth) tables.push(...series.map((one) => [one.xs, one.ys] as uPlot.AlignedData));
  const data = tables.length === 1 ? tables[0]! : uPlot.join(tables);
  const line = (one: Series, faint: boolean): uPlot.Series => ({
    label: one.label,
    stroke: () => style(one.colour) + (faint ? "40" : ""),
    width: faint ? 1 : 1.75,
    spanGaps: true,
    points: { show: one.points || one.xs.length === 1, size: 5 },
  });
  const tell = (plot: uPlot) => {
    const at = plot.cursor.idx ?? null;
    const texts = series.map((one, index) => {
      const column = plot.data[index + 1]!;
      let place = at ?? column.length - 1;
      while (place > 0 && (column[place] === null || column[place] === undefined)) place -= 1;
      return [one, number(column[place] as number | null)] as const;
    });
    values.replaceChildren(
      ...(at === null ? [] : [text("span", "at", `step ${data[0]![at]}`)]),
      ...texts.map(([one, value]) => {
        const found = text("span", "value", value);
        found.style.color = style(one.colour);
        found.title = one.label;
        return found;
      }),
    );
  };
  const axis = { stroke: () => style("--muted"), grid: { stroke: () => style("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return new uPlot(
    {
      width: Math.max(element.clientWidth, 50),
      height,
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => fitting(low, high) } },
      axes: [{ ...axis, size: 22, space: 60 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
      series: [{}, ...series.map((one) => line(one, false)), ...(smooth ? series.map((one) => line(one, true)) : [])],
      hooks: { setCursor: [tell], ready: [tell] },
    },
    data,
    element,
  );
}

// The part of an axis that values take, with some room. uPlot would draw values that are all 0 on an axis from 0 to 100.
export function fitting(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
  // Values that cannot be negative have no negative axis.
  return [low >= 0 ? Math.max(0, low - room) : low - room, high <= 0 && low < 0 ? Math.min(0, high + room) : high + room];
}

function text(tag: string, name: string, content: string): HTMLElement {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = content;
  return made;
}
