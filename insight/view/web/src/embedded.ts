// Answers the page's requests from a report file, as insight/view/page.py would.

import type { Metrics, Row, Trajectory } from "./types";

interface EmbeddedRun {
  metrics: Metrics;
  rows: Row[];
  trajectories: Record<string, Trajectory>;
  recorded: { trajectories: number; steps: number };
  [answer: string]: unknown;
}

interface Report {
  runs: unknown[];
  run: Record<string, EmbeddedRun>;
}

export function embedded(report: Report): (path: string) => unknown {
  return (path) => {
    const [place = "", query = ""] = path.split("?");
    const given = new URLSearchParams(query);
    if (place === "runs") return report.runs;
    const [, name = "", kind = "", key = ""] = place.split("/").map(decodeURIComponent);
    const run = report.run[name];
    if (!run) throw new Error(`the report has no run ${name}`);
    if (kind === "metrics") return metrics(run.metrics, (given.get("keys") ?? "").split(","));
    if (kind === "trajectories") return key ? found(run.trajectories[key]) : page(run, given);
    if (kind === "groups") return group(run, key);
    return found(run[kind === "compare" ? `compare ${given.get("before")} ${given.get("after")}` : kind]);
  };
}

function found<T>(value: T | undefined): T {
  if (value === undefined) throw new Error("this is not in the report; `rl-async view` has it");
  return value;
}

function metrics(all: Metrics, keys: string[]): Metrics {
  return { ...all, columns: Object.fromEntries(keys.filter((k) => k in all.columns).map((k) => [k, all.columns[k]!])) };
}

export const keyOf = (row: { partition: string; step: number; grp: number; sample: number; segment: number }) =>
  `${row.partition}-${row.step}-${row.grp}-${row.sample}-${row.segment}`;

// Asks for the trajectories of the same task, the newest first: a page has 100 at most. Data sources may name tasks alike.
export const sameTask = (row: { task: string; source: string }) => `${new URLSearchParams({ task: row.task, source: row.source, order: "newest" })}`;

const total = (row: Row) => row.reward + row.turn_reward;
const tests: Record<string, (row: Row, value: string, full: Trajectory | undefined) => boolean> = {
  partition: (row, value) => row.partition === value,
  step: (row, value) => row.step === Number(value),
  step_from: (row, value) => row.step >= Number(value),
  step_to: (row, value) => row.step <= Number(value),
  group: (row, value) => row.grp === Number(value),
  task: (row, value) => row.task === value,
  source: (row, value) => row.source === value,
  reward_from: (row, value) => total(row) >= Number(value),
  reward_to: (row, value) => total(row) <= Number(value),
  finish: (row, value) => row.finish === value,
  error: (row) => !!row.error,
  failed_call: (row) => row.failed_calls > 0,
  masked: (row) => (row.masked ?? 0) > 0,
  unparsed: (_, __, full) => !!full?.turns.some((turn) => turn.tool_calls.some((call) => !call.name)),
  tool: (_, value, full) => !!full?.turns.some((turn) => turn.tool_calls.some((call) => call.name === value)),
  engine: (_, value, full) => !!full?.activities.some(([kind, name]) => kind === "generate" && name === value),
  failed_tool: (_, value, full) => !!full?.turns.some((turn) => turn.tool_calls.some((call) => call.name === value && call.error)),
  rule: (_, value, full) => !!full?.tokens.rule.includes(value),
  text: (_, value, full) => !!full && says(full, value),
};
// Signs of scripts without spaces, each of which is a word, as insight/view/index.py has it.
const SIGN = /[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\u{20000}-\u{3ffff}]/gu;
// The words of a text, apart by single spaces: case, accents and punctuation do not count.
const bare = (text: string) => text.replace(SIGN, " $& ").normalize("NFKD").toLowerCase().replace(/\p{M}/gu, "").replace(/[^\p{L}\p{N}]+/gu, " ").trim();

// Whether a trajectory has all words, and all phrases in quotes; the last word also counts as the beginning of one.
function says(full: Trajectory, wanted: string): boolean {
  const calls = full.turns.flatMap((turn) => turn.tool_calls.flatMap((call) => [call.name, call.arguments, call.error, call.result]));
  const text = ` ${bare([full.error, ...full.turns.map((turn) => turn.text), ...calls, ...Object.values(full.reward_reasons), full.ground_truth].join("\n"))} `;
  const parts = wanted.split('"');
  const phrases = parts.filter((_, at) => at % 2 === 1).map(bare);
  const words = parts.filter((_, at) => at % 2 === 0).flatMap((part) => part.split(/\s+/)).map(bare).filter(Boolean);
  const last = words.pop();
  return [...phrases.filter(Boolean), ...words].every((term) => text.includes(` ${term} `)) && (!last || text.includes(` ${last}`));
}

const LARGEST = Number.MAX_VALUE; // stands for no weight: such rows come last
const place = (a: Row, b: Row) => a.grp - b.grp || a.sample - b.sample || a.segment - b.segment;
const orders: Record<string, (a: Row, b: Row) => number> = {
  newest: (a, b) => b.step - a.step || place(a, b),
  oldest: (a, b) => a.step - b.step || place(a, b),
  reward_low: (a, b) => total(a) - total(b) || b.step - a.step,
  reward_high: (a, b) => total(b) - total(a) || b.step - a.step,
  masked: (a, b) => (b.masked ?? 0) - (a.masked ?? 0) || b.step - a.step,
  difference: (a, b) => (b.difference ?? -1) - (a.difference ?? -1) || b.step - a.step,
  weight: (a, b) => (a.min_weight ?? LARGEST) - (b.min_weight ?? LARGEST) || b.step - a.step,
  tokens: (a, b) => b.tokens - a.tokens || b.step - a.step,
  seconds: (a, b) => (b.seconds ?? -1) - (a.seconds ?? -1) || b.step - a.step,
  failed_calls: (a, b) => b.failed_calls - a.failed_calls || b.step - a.step,
};

// What the columns of the list show, by which a click on a head sorts.
const shown: Record<string, (row: Row) => string | number | null> = {
  step: (row) => row.step,
  group: (row) => row.grp,
  reward: total,
  prompt: (row) => row.prompt,
  expected: (row) => row.expected,
  answer: (row) => row.answer,
  tokens: (row) => row.tokens,
  masked: (row) => row.masked,
  staleness: (row) => row.staleness,
  end: (row) => row.finish,
};

// The order of a column, such as tokens_down; rows without a value come last.
function byColumn(order: string): ((a: Row, b: Row) => number) | undefined {
  const [, name = "", way] = /^(\w+)_(up|down)$/.exec(order) ?? [];
  const value = shown[name];
  if (!value) return undefined;
  return (a, b) => {
    const [one, two] = [value(a), value(b)];
    if (one === two) return b.step - a.step || place(a, b);
    if (one === null || two === null) return one === null ? 1 : -1;
    return (one < two ? -1 : 1) * (way === "up" ? 1 : -1);
  };
}

function page(run: EmbeddedRun, given: URLSearchParams): unknown {
  const wanted = [...given].filter(([name]) => name in tests);
  const rows = run.rows.filter((row) =>
    wanted.every(([name, value]) => tests[name]!(row, value, run.trajectories[keyOf(row)])),
  );
  const wantedOrder = given.get("order") ?? "newest";
  const order = orders[wantedOrder] ?? byColumn(wantedOrder);
  if (order) rows.sort(order);
  const offset = Number(given.get("offset") ?? 0);
  const shown = rows.slice(offset, offset + Number(given.get("limit") ?? 100));
  return { count: rows.length, offset, rows: shown, recorded: run.recorded.trajectories };
}

function group(run: EmbeddedRun, key: string): unknown {
  return run.rows
    .filter((row) => `${row.partition}-${row.step}-${row.grp}` === key)
    .map((row) => ({ ...row, turns: run.trajectories[keyOf(row)]?.turns, error_text: run.trajectories[keyOf(row)]?.error }));
}
