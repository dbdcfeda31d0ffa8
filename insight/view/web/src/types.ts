// What the server answers; insight/view/page.py lists the routes.

export interface RunSummary {
  name: string;
  folder: string;
  mode: string;
  model: string;
  data: string;
  algorithm: string;
  commit: string; // of rl-async, as at the last start; empty: unknown
  started: number | null; // Unix time
  ended: number | null; // the newest thing recorded, or now while it runs
  steps: number; // 0: it only evaluates
  steps_done: number;
  running: boolean;
  finished: boolean; // all steps are trained, or the evaluation is recorded
  began: number;
  reward: number | null;
  evaluation: number | null;
  trajectories: boolean;
  problem: string; // what of it cannot be read, and why
}

export type Config = Record<string, unknown>;
export type Column = (number | null)[];

export interface Metrics {
  epoch: number;
  begin: number;
  count: number;
  steps: number[];
  columns: Record<string, Column>;
  names: string[];
}

export interface Change {
  run: string;
  epoch: number;
  count: number;
  evaluations: number;
  indexed: Progress | null;
  running: boolean;
}

export interface Progress {
  looked: boolean; // at the folder, at least once
  indexed: number;
  files: number;
}

export interface Choice {
  value: string;
  rows: number;
  tokens?: number;
}

// Calls of a tool; seconds of all of them, and of the slowest.
export interface ToolUse {
  value: string;
  calls: number;
  failed: number;
  seconds: number;
  slowest: number;
  errors: { value: string; calls: number }[]; // the most frequent
}

// Turns that an engine sampled; their seconds, and tokens per second.
export interface EngineUse {
  value: string;
  rows: number;
  turns: number;
  seconds: number;
  slowest: number;
  tokens: number;
  speed: number | null;
}

export interface Choices {
  source: Choice[];
  finish: Choice[];
  partition: Choice[];
  tool: ToolUse[];
  engine: EngineUse[];
  rule: Choice[];
  steps: [number | null, number | null];
  orders: string[];
  progress: Progress;
  problem: string;
  damaged: Record<string, string>;
}

export interface Row {
  partition: string;
  step: number;
  lineage: number;
  grp: number;
  sample: number;
  segment: number;
  role: string; // in an episode of several
  task: string;
  source: string;
  reward: number;
  turn_reward: number;
  finish: string;
  error: number;
  tokens: number;
  sampled: number;
  masked: number | null;
  min_weight: number | null;
  advantage: number | null;
  difference: number | null;
  staleness: number | null;
  calls: number;
  failed_calls: number;
  seconds: number | null;
  prompt: string;
  answer: string;
  expected: string;
}

// Rows with the same value of the field that a filter groups by.
export interface RowGroup {
  value: string | number | null;
  rows: number;
  reward: number;
  lowest: number;
  highest: number;
  tokens: number;
  failed_calls: number;
  errors: number;
}

export interface Page {
  count: number; // of groups, if it has any
  offset: number;
  rows: Row[];
  by?: string;
  groups?: RowGroup[];
  recorded?: number; // of a report: how many trajectories the run has
}

export interface Call {
  name: string;
  arguments: string;
  result: string;
  cut?: number; // characters of the whole result, of which the policy saw the beginning
  error: string;
  problem: string | null;
  reward: number | null;
  reason: string;
  seconds: number;
}

export interface Turn {
  role: string;
  text: string;
  start: number;
  end: number;
  tool_calls: Call[];
  reward: number | null;
  reason: string;
  seconds: number;
}

export interface Tokens {
  id: number[];
  text: (string | null)[];
  logprob: Column;
  trained_logprob: Column;
  version: ([number, number] | null)[];
  staleness: Column;
  weight: Column;
  rule: (string | null)[];
  constrained: boolean[]; // sampled under a grammar
  advantage: Column;
  turn: Column;
}

// A row of a list without its count of tokens, with everything that was recorded of it.
export interface Medium {
  sha256: string;
  mime: string;
  position: number; // of its first token
}

export interface Trajectory extends Omit<Row, "tokens" | "error" | "turns"> {
  media: Medium[];
  tokens: Tokens;
  turns: Turn[];
  error: string;
  reward_parts: Record<string, number>;
  reward_reasons: Record<string, string>; // of parts; of an agent program's whole reward, as `reward`
  scored: boolean;
  baseline: boolean;
  explained: boolean;
  problem?: string; // why the tokens have no text
  timings: Record<string, number>;
  activities: [kind: string, name: string, began: number, seconds: number][];
  ground_truth: string;
  sampling: { temperature: number; top_p: number; top_k: number; min_p: number };
}

export interface GroupRow extends Omit<Row, "turns"> {
  turns: Turn[];
  error_text: string;
}

export type Interval = [number, number, number];

export interface EvaluationLine {
  step: number;
  source: string;
  tasks: number;
  episodes: number;
  k: number;
  average: Interval;
  passed: Record<string, Interval>;
}

export interface Evaluations {
  records: Record<string, number>[];
  solved: number; // an episode passes with this reward
  table: EvaluationLine[];
}

// How the tasks of one data source that both evaluations have were answered before and after.
export interface SourceChange {
  source: string;
  tasks: number;
  before: Interval;
  after: Interval;
  change: Interval;
  better: number;
  worse: number;
  p: number;
}

export interface TaskChange {
  source: string;
  task: string;
  question: string;
  before: number;
  after: number;
  replied_before: string;
  replied_after: string;
  keys: [string, string]; // of its trajectories before and after
}

export interface Comparison {
  sources: SourceChange[];
  tasks: TaskChange[]; // those that became worse most first
  count: number;
  left_out: number; // that one of both alone has, or with another prompt
  unscored: [number, number];
}

export interface Update {
  process: string;
  version: string;
  stage: string; // empty: it is over
  began: number;
  ended: number;
}

export interface Diagnosis {
  at: number;
  updates: Update[];
  verdict: { health: string; findings: string[]; waits: string[] };
  observation: {
    launcher: number | null;
    processes: {
      record: { name: string; role: string; pid: number; state: string; restarts: number; exit: number | null };
      state: string;
      cpu: number;
      log_line: string;
      stack: { file: string; line: string; name: string }[];
    }[];
    ranks: { rank: number; step: number; phase: string; for_s: number }[];
    queue: { report: { status: QueueStatus; rates: Record<string, number>; draining: boolean; workers: HeldByWorker[] } } | null;
    engines: { engine_id: string; url: string; answers: boolean; version: string; paused: boolean | null; requests: number | null }[];
    steps: number;
    steps_done: number;
    usual_step_s: number | null;
    trouble: string[];
  };
}

export interface HeldByWorker {
  worker: string;
  samples: number;
  groups: number;
  oldest_s: number;
}

export interface QueueStatus {
  published: [number, number];
  waiting: number;
  leased: number;
  ready: number;
  reserved: number;
  committed: number;
  slots_used: number;
  slots: number;
  max_staleness: number;
  admitted: number;
  workers: number;
  counters: Record<string, number>;
}
