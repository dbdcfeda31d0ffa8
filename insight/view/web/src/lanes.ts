// What /timeline answers; insight/timeline.py says what a lane and a span are.

export type Recorded = [began: number, ended: number, kind: string, name: string, step: number, key: string, about: string];

export interface Lane {
  process: string;
  title: string;
  rows: Recorded[][];
}

export interface Timeline {
  from: number;
  to: number;
  began: number;
  until: number;
  running: boolean;
  detailed: boolean;
  left_out: number;
  steps: [step: number, began: number, ended: number][];
  lanes: Lane[];
}

export interface Span {
  began: number;
  ended: number;
  kind: string;
  name: string;
  step: number;
  key: string;
  about: string;
  process: string;
}

export const KINDS: Record<string, string> = {
  train: "train",
  wait: "wait",
  sync: "weights",
  checkpoint: "checkpoint",
  other: "report",
  generate: "generate",
  tool: "tool",
  environment: "environment",
  reward: "reward",
  start: "starting",
  down: "gone",
};

export function asSpan([began, ended, kind, name, step, key, about]: Recorded, lane: Lane): Span {
  return { began, ended, kind, name, step, key, about, process: lane.process };
}
