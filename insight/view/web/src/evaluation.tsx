// Evaluations: what each version reached by data source, and the answers of two versions side by side.

import { Fragment } from "preact";
import { useState } from "preact/hooks";
import { live, parameters, run as runPath, useLoaded } from "./api";
import { keyOf } from "./embedded";
import { number, signed, visible } from "./format";
import { commonTurns } from "./group";
import { address, go, Missing, type Place } from "./place";
import { PlainText } from "./tokens";
import { Reward } from "./trajectories";
import { TurnFrame } from "./trajectory";
import type { Change, Comparison, EvaluationLine, Evaluations, GroupRow, Interval, RunSummary } from "./types";

export function EvaluationPage({ name, runs, place, change }: { name: string; runs: RunSummary[]; place: Place; change: Change | undefined }) {
  const [solved, setSolved] = useState(""); // empty: as the run says
  const again = `${change?.evaluations} ${change?.indexed?.indexed}`;
  const { value, error, stale } = useLoaded<Evaluations>(`${runPath(name)}/evaluations?${parameters({ solved })}`, again);
  const steps = [...new Set((value?.table ?? []).map((line) => line.step))];
  const other = place.given.other || name;
  const others = useLoaded<Evaluations>(other === name ? null : `${runPath(other)}/evaluations?${parameters({ solved })}`);
  const otherSteps = other === name ? steps : [...new Set((others.value?.table ?? []).map((line) => line.step))];
  const before = place.given.before || `${(other === name ? steps[0] : steps.at(-1)) ?? ""}`;
  const after = place.given.after || `${otherSteps.at(-1) ?? ""}`;
  const compared = runs.filter((run) => run.trajectories);
  const set = (given: Record<string, string>) => go({ ...place, given: { ...place.given, ...given } }, true);
  if (error) return <Missing why={visible(error)} to={{ page: "run", run: name }} title={<>the run {name}</>} />;
  if (!value || stale) return <main class="page"><p class="quiet">Loading …</p></main>;
  if (!value.table.length) return <main class="page"><p class="quiet">{whyNone(value, change)}</p></main>;
  return (
    <main class="page">
      {live && <div class="bar"><label>an episode passes with a reward of <input type="number" step="any" value={solved || `${value.solved}`} onChange={(event) => setSolved(event.currentTarget.value)} /></label></div>}
      {!live && <p>An episode passes with a reward of {number(value.solved)}.</p>}
      <Unread change={change} />
      <Table lines={value.table} />
      <p class="quiet">Whiskers are 95 % intervals over tasks (Wilson for numbers between 0 and 1): several samples of one task are not independent evidence.</p>
      {(steps.length > 1 || compared.length > 1) && (
        <>
          <h2>
            Answers of version <Steps label="before" steps={live ? steps : [steps[0]!]} value={before} set={(one) => set({ before: one })} /> and version <Steps label="after" steps={live ? otherSteps : [steps.at(-1)!]} value={after} set={(one) => set({ after: one })} />
            {live && compared.length > 1 && (
              <> of <select aria-label="compared with" value={other} onChange={(event) => set({ other: event.currentTarget.value, before: "", after: "" })}>
                {compared.map((run) => <option value={run.name} key={run.name}>{run.name === name ? "the same run" : run.name}</option>)}
              </select></>
            )}
          </h2>
          {others.error && <p class="problem">{others.error}</p>}
          {other !== name && others.value && !otherSteps.length && <p class="quiet">{other} has no evaluation in its index; open its own page first if it has just been added.</p>}
          {before && after && !others.stale && <Compared name={name} other={other} before={before} after={after} again={again} />}
        </>
      )}
    </main>
  );
}

// What the index lacks, so that nobody takes its numbers for those of the whole run.
function Unread({ change }: { change: Change | undefined }) {
  const progress = change?.indexed;
  if (!progress || progress.indexed >= progress.files) return null;
  return <p class="problem" role="status">The index is being built: the numbers below are of {number(progress.indexed)} of {number(progress.files)} recorded files, and versions may be missing.</p>;
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
              <td class="figure">{line.step}</td><td>{line.source || "unnamed"}</td><td class="figure optional">{number(line.tasks)}</td><td class="figure optional">{number(line.k)}{line.episodes > line.k * line.tasks && " or more"}</td>
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

function Compared({ name, other, before, after, again }: { name: string; other: string; before: string; after: string; again: string }) {
  const query = parameters({ before, after, with: other === name ? "" : other });
  const [opened, setOpened] = useState("");
  const { value, error, stale } = useLoaded<Comparison>(`${runPath(name)}/compare?${query}`, again);
  if (error) return <p class="problem">{error}</p>;
  if (!value || stale) return <p class="quiet" role="status">Comparing …</p>;
  const [old, now] = [`version ${before}`, other === name ? `version ${after}` : `${other}, version ${after}`];
  return (
    <>
      <div class="scroll">
        <table class="evaluations">
          <thead><tr><th>source</th><th class="optional">tasks</th><th>before</th><th>after</th><th>change (95 %)</th><th>worse</th><th>better</th><th title="probability of a change at least as large by chance">p</th></tr></thead>
          <tbody>
            {value.sources.map((line) => (
              <tr key={line.source}>
                <td>{visible(line.source || "unnamed")}</td><td class="figure optional">{number(line.tasks)}</td>
                <td class="figure">{number(line.before[0])}</td><td class="figure">{number(line.after[0])}</td>
                <td class="figure"><b class={line.p > 0.05 ? "quiet" : line.change[0] < 0 ? "bad" : "good"}>{signed(line.change[0])}</b> ({signed(line.change[1])} to {signed(line.change[2])})</td>
                <td class="figure">{number(line.worse)}</td><td class="figure">{number(line.better)}</td><td class="figure">{number(line.p, 2)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="quiet">
        p is the probability of a change at least as large if the sign of each task's change were random: a paired randomization test, the same as in <code>rl-async compare</code>.
        {value.left_out > 0 && ` Left out: ${number(value.left_out)} tasks that one of both alone has, or with another prompt.`}
        {value.unscored.some(Boolean) && ` Not scored, counted as 0: ${number(value.unscored[0])} episodes before, ${number(value.unscored[1])} after.`}
        {value.count > value.tasks.length && ` Below are the ${number(value.tasks.length)} tasks that became worse most, of ${number(value.count)}.`}
      </p>
      <table class="rows compared">
        <thead><tr><th>task</th><th>{old}</th><th>{now}</th><th>change</th></tr></thead>
        <tbody>
          {value.tasks.map((task) => (
            <Fragment key={task.keys.join()}>
              <tr>
                <td class="preview"><button class="plain" aria-expanded={opened === task.keys.join()} title="both answers in whole" onClick={() => setOpened(opened === task.keys.join() ? "" : task.keys.join())}>{opened === task.keys.join() ? "▾" : "▸"} {value.sources.length > 1 && <b>{visible(task.source)} </b>}{visible(task.question)}</button></td>
                <td><Answer run={name} trajectory={task.keys[0]} reward={task.before} text={task.replied_before} /></td>
                <td><Answer run={other} trajectory={task.keys[1]} reward={task.after} text={task.replied_after} /></td>
                <td class={task.after < task.before ? "figure bad" : task.after > task.before ? "figure good" : "figure quiet"}>{signed(task.after - task.before)}</td>
              </tr>
              {opened === task.keys.join() && <tr class="opened"><td colSpan={4}><SideBySide runs={[name, other]} titles={[old, now]} keys={task.keys} /></td></tr>}
            </Fragment>
          ))}
        </tbody>
      </table>
    </>
  );
}

function Answer({ run, trajectory, reward, text }: { run: string; trajectory: string; reward: number; text: string }) {
  return <a class="answer" href={address({ page: "trajectory", run, key: trajectory })}><Reward value={reward} /> <span class="preview">{visible(text)}</span></a>;
}

// The whole answers of both versions in the task's first sample. What both were asked stands once, above them.
function SideBySide({ runs, titles, keys }: { runs: [string, string]; titles: [string, string]; keys: [string, string] }) {
  const [before, after] = [useAnswer(runs[0], keys[0]), useAnswer(runs[1], keys[1])];
  const error = before.error || after.error;
  if (error) return <p class="problem">{error}</p>;
  if (!before.rows || !after.rows) return <p class="quiet">Loading …</p>;
  const all = [...before.rows, ...after.rows];
  const common = all.length ? commonTurns(all) : 0;
  return (
    <>
      {all[0]?.turns.slice(0, common).map((turn, index) => <TurnFrame key={index} turn={turn}><PlainText text={turn.text} /></TurnFrame>)}
      <div class="columns">
        {[before.rows, after.rows].map((rows, side) => (
          <section key={side} aria-label={titles[side]}>
            <h2><a href={address({ page: "trajectory", run: runs[side]!, key: keys[side]! })}>{titles[side]}</a></h2>
            {!rows.length && <p class="quiet">This answer is not in the report; `rl-async view` has it.</p>}
            {rows.map((row) => (
              <Fragment key={keyOf(row)}>
                <p><Reward value={row.reward + row.turn_reward} /></p>
                {row.error_text && <p class="problem">{visible(row.error_text)}</p>}
                {row.turns.slice(common).map((turn, index) => <TurnFrame key={index} turn={turn}><PlainText text={turn.text} /></TurnFrame>)}
              </Fragment>
            ))}
          </section>
        ))}
      </div>
    </>
  );
}

// The rows of a trajectory's sample that are of its role.
function useAnswer(run: string, key: string): { rows: GroupRow[] | undefined; error: string } {
  const [partition, step, group, sample] = key.split("-");
  const { value, error } = useLoaded<GroupRow[]>(`${runPath(run)}/groups/${partition}-${step}-${group}?${parameters({ sample })}`);
  const role = value?.find((row) => keyOf(row) === key)?.role;
  return { rows: value?.filter((row) => `${row.sample}` === sample && row.role === role), error };
}
