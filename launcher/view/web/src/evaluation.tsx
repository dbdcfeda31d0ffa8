// Evaluations: what each version reached by data source, and the answers of two versions side by side.

import { useState } from "preact/hooks";
import { live, parameters, run as runPath, useLoaded } from "./api";
import { keyOf } from "./embedded";
import { number, signed, visible } from "./format";
import { address, go, type Place } from "./main";
import { Reward } from "./trajectories";
import type { Change, Comparison, EvaluationLine, Evaluations, Interval, Side } from "./types";

export function EvaluationPage({ name, place, change }: { name: string; place: Place; change: Change | undefined }) {
  const [solved, setSolved] = useState("1");
  const again = `${change?.evaluations} ${change?.indexed?.indexed}`;
  const { value, error } = useLoaded<Evaluations>(`${runPath(name)}/evaluations?${parameters({ solved })}`, again);
  const steps = [...new Set((value?.table ?? []).map((line) => line.step))];
  const before = place.given.before ?? `${steps[0] ?? ""}`;
  const after = place.given.after ?? `${steps.at(-1) ?? ""}`;
  const set = (given: Record<string, string>) => go({ ...place, given: { ...place.given, ...given } }, true);
  if (error) return <main class="page"><p class="problem">{error}</p></main>;
  if (!value) return <main class="page"><p class="quiet">Loading …</p></main>;
  if (!value.table.length) return <main class="page"><p class="quiet">{whyNone(value, change)}</p></main>;
  return (
    <main class="page">
      {live && <div class="bar"><label>an episode passes with a reward of <input type="number" step="any" value={solved} onChange={(event) => setSolved(event.currentTarget.value || "1")} /></label></div>}
      {!live && <p>An episode passes with a reward of 1.</p>}
      <Table lines={value.table} />
      <p class="quiet">Whiskers are 95 % intervals over tasks (Wilson for numbers between 0 and 1): samples of one task are no further evidence.</p>
      {steps.length > 1 && (
        <>
          <h2>
            Answers of version <Steps label="before" steps={live ? steps : [steps[0]!]} value={before} set={(one) => set({ before: one })} /> and version <Steps label="after" steps={live ? steps : [steps.at(-1)!]} value={after} set={(one) => set({ after: one })} />
          </h2>
          <Compared name={name} before={before} after={after} again={again} />
        </>
      )}
    </main>
  );
}

function whyNone(found: Evaluations, change: Change | undefined): string {
  const progress = change?.indexed;
  if (live && !progress?.looked) return "The recorded trajectories are about to be read …";
  if (progress && progress.indexed < progress.files) return `The recorded trajectories are being read, ${number(progress.indexed)} of ${number(progress.files)} files so far …`;
  if (found.records.length) return "The evaluations' results were recorded, but not their trajectories. The run's page draws the results.";
  return "This run has recorded no evaluation yet. They take data.eval_path; eval.before=true adds one of the initial weights.";
}

function Table({ lines }: { lines: EvaluationLine[] }) {
  const k = Math.max(...lines.map((line) => line.k));
  const all = lines.map((line) => line.average);
  const [low, high] = [Math.min(0, ...all.map((one) => one[1])), Math.max(1, ...all.map((one) => one[2]))];
  return (
    <div class="scroll">
      <table class="evaluations">
        <thead><tr><th>version</th><th>source</th><th class="optional">tasks</th><th class="optional">samples</th><th>avg@{k}</th><th>pass@1</th>{k > 1 && <th>pass@{k}</th>}</tr></thead>
        <tbody>
          {lines.map((line) => (
            <tr key={`${line.step} ${line.source}`}>
              <td class="figure">{line.step}</td><td>{line.source || "all"}</td><td class="figure optional">{number(line.tasks)}</td><td class="figure optional">{number(line.episodes)}</td>
              <td><Whisker interval={line.average} low={low} high={high} /></td>
              <td><Whisker interval={line.passed["1"]} low={0} high={1} /></td>
              {k > 1 && <td><Whisker interval={line.passed[`${line.k}`]} low={0} high={1} /></td>}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Whisker({ interval, low, high }: { interval: Interval | undefined; low: number; high: number }) {
  if (!interval) return <>–</>;
  const place = (value: number) => `${(100 * (value - low)) / (high - low)}%`;
  const [value, from, to] = interval;
  return (
    <span class="whisker" title={`${number(from)} to ${number(to)}`}>
      <span class="figure">{number(value)}</span>
      <span class="track"><span class="span" style={{ left: place(from), width: `${(100 * (to - from)) / (high - low)}%` }} /><span class="mark" style={{ left: place(value) }} /></span>
    </span>
  );
}

function Steps({ label, steps, value, set }: { label: string; steps: number[]; value: string; set: (value: string) => void }) {
  return <select aria-label={label} value={value} onChange={(event) => set(event.currentTarget.value)}>{steps.map((step) => <option value={step} key={step}>{step}</option>)}</select>;
}

function Compared({ name, before, after, again }: { name: string; before: string; after: string; again: string }) {
  const { value, error } = useLoaded<Comparison>(`${runPath(name)}/compare?${parameters({ before, after })}`, again);
  if (error) return <p class="problem">{error}</p>;
  if (!value) return null;
  return (
    <>
      <p>
        Of {number(value.tasks)} tasks <b class="bad">{number(value.worse)} are worse</b>, <b class="good">{number(value.better)} better</b>
        {value.mean && <>; on average {signed(value.mean[0])} ({signed(value.mean[1])} to {signed(value.mean[2])}{value.mean[1] <= 0 && value.mean[2] >= 0 ? ", which may be chance" : ""})</>}.
        {value.left_out > 0 && ` Left out: ${number(value.left_out)} that one of both alone has, or with another prompt.`}
      </p>
      <table class="rows compared">
        <thead><tr><th>task</th><th>version {before}</th><th>version {after}</th><th>change</th></tr></thead>
        <tbody>
          {value.rows.map(({ before: old, after: now }) => (
            <tr key={`${old.source} ${old.role} ${old.task}`}>
              <td class="preview">{old.role && <b>{visible(old.role)} </b>}{visible(old.prompt)}</td>
              <td><Answer name={name} step={before} side={old} /></td>
              <td><Answer name={name} step={after} side={now} /></td>
              <td class={now.reward < old.reward ? "figure bad" : now.reward > old.reward ? "figure good" : "figure quiet"}>{signed(now.reward - old.reward)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

function Answer({ name, step, side }: { name: string; step: string; side: Side }) {
  const key = keyOf({ partition: "eval", step: Number(step), grp: side.grp, sample: side.sample, segment: side.segment });
  return <a class="answer" href={address({ page: "trajectory", run: name, key })}><Reward value={side.reward} /> <span class="preview">{visible(side.answer)}</span></a>;
}
