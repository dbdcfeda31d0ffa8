// The loop as a living drawing, doctor's verdict, who waits for whom, and the timeline.

import { useEffect, useRef, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { live, run as runPath, useLoaded } from "./api";
import { number, seconds, visible } from "./format";
import { TimelineView } from "./timeline";
import type { Diagnosis } from "./types";

const AGAIN_MS = 2000;
const JUST_S = 5; // for which an update that is over is still shown as one that travels
const PHASES: Record<string, string> = { starting: "start", training: "train", publishing: "sync", checkpointing: "checkpoint", reporting: "other" };

type Seen = Diagnosis["observation"];

export function FlowPage({ name, running }: { name: string; running: boolean }) {
  const [at, setAt] = useState(0);
  const [stacks, setStacks] = useState("");
  useEffect(() => {
    const timer = live ? setInterval(() => !document.hidden && setAt((old) => old + 1), AGAIN_MS) : undefined;
    return () => clearInterval(timer);
  }, []);
  const { value, error } = useLoaded<Diagnosis>(`${runPath(name)}/diagnosis`, at);
  return (
    <main class="page">
      {error && <p class="problem">{error}</p>}
      {!error && !value && <p class="quiet">Asking every process …</p>}
      {value && !error && <Verdict value={value} />}
      {value && !error && value.observation.launcher !== null && <Loop value={value} />}
      <TimelineView name={name} running={running} key={name} />
      {value && !error && <Waits value={value} />}
      {value && !error && <Processes seen={value.observation} />}
      {value && running && <Stacks name={name} again={stacks} ask={() => setStacks(`${Date.now()}`)} />}
      {value?.observation.trouble.map((one) => <p class="quiet" key={one}>could not be observed: {visible(one)}</p>)}
    </main>
  );
}

function Verdict({ value }: { value: Diagnosis }) {
  const [first, ...others] = value.verdict.findings;
  return (
    <section class={`verdict ${value.verdict.health}`}>
      <b>{value.verdict.health === "over" ? "finished" : value.verdict.health}</b> {visible(first ?? "")}
      {others.length > 0 && <ul>{others.map((one) => <li key={one}>{visible(one)}</li>)}</ul>}
    </section>
  );
}

function Waits({ value }: { value: Diagnosis }) {
  if (!value.verdict.waits.length) return null;
  return <section><h2>who waits for whom</h2><ul>{value.verdict.waits.map((one) => <li key={one}>{visible(one)}</li>)}</ul></section>;
}

function Processes({ seen }: { seen: Seen }) {
  return (
    <>
      <h2>processes</h2>
      <table class="rows">
        <thead><tr><th>process</th><th>state</th><th>cores</th><th class="optional">restarts</th><th>last line of its log</th></tr></thead>
        <tbody>
          {seen.processes.map((process) => (
            <tr key={process.record.name}>
              <td>{process.record.name}</td>
              <td class={["failed", "restarting"].includes(process.record.state) ? "problem" : ""}>{process.record.state}</td>
              <td class="figure">{number(process.cpu, 2)}</td>
              <td class="figure optional">{process.record.restarts || ""}</td>
              <td class="preview">{visible(process.log_line.slice(0, 300))}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

function Stacks({ name, again, ask }: { name: string; again: string; ask: () => void }) {
  const { value, error } = useLoaded<Diagnosis>(again ? `${runPath(name)}/diagnosis?stacks=1` : null, again);
  return (
    <section class="stacks">
      <h2>stacks</h2>
      <p class="quiet">Where the main thread of each process is now. <button onClick={ask}>ask for stacks</button></p>
      {error && <p class="problem">{error}</p>}
      {value?.observation.processes.filter((process) => process.stack.length).map((process) => (
        <details key={process.record.name}>
          <summary>{process.record.name}: in {process.stack[0]!.name}</summary>
          <ol class="text">{process.stack.map((frame, index) => <li key={index}>{frame.name} ({frame.file}:{frame.line})</li>)}</ol>
        </details>
      ))}
    </section>
  );
}

function Loop({ value }: { value: Diagnosis }) {
  const seen = value.observation;
  const status = seen.queue?.report.status;
  const workers = seen.processes.filter((process) => ["worker", "gateway"].includes(process.record.role));
  const waits = seen.ranks.some((rank) => rank.phase === "waiting for a batch");
  const rate = seen.queue?.report.rates.rows ?? 0;
  const travelling = value.updates.filter((update) => update.stage || value.at - update.ended < JUST_S);
  const newest = value.updates.filter((update) => !update.stage).map((update) => update.version).sort(byVersion).at(-1);
  return (
    <div class="loop" aria-label="the loop">
      <Stage name="queue" title="queue" note={status ? `${status.slots_used} of ${status.slots} slots used` : "no answer"}>
        {status && <States status={status} />}
      </Stage>
      <Arrow name="tasks" text="tasks" moving={Boolean(status?.leased)} />
      <Stage name="workers" title="agent workers" note={`${workers.length} started${status ? `, ${status.workers} connected` : ""}`}>
        {seen.queue && <p><span class="figure">{number(rate)}</span> rows per second</p>}
        <Workers processes={workers} seen={seen} />
      </Stage>
      <Arrow name="tokens" text="prompts ⇄ tokens" moving={seen.engines.some((engine) => engine.requests)} />
      <Stage name="engines" title="engines" note={seen.engines.length ? "" : "none registered"}><Engines value={value} newest={newest} /></Stage>
      <Arrow name="batches" text={waits ? "the trainer waits for a batch" : `${number(status?.ready)} ${status?.ready === 1 ? "group" : "groups"} ready`} starved={waits} moving={!waits && seen.ranks.length > 0} />
      <Stage name="trainer" title="trainer" note={`${number(seen.steps_done)} of ${number(seen.steps)} steps${seen.usual_step_s ? `, ${seconds(seen.usual_step_s)} each` : ""}`}>
        <ul>
          {seen.ranks.map((rank) => (
            <li key={rank.rank}><i class={`patch kind-${PHASES[rank.phase] ?? "wait"}`} /> rank {rank.rank}: {rank.phase} of step {rank.step}, for {seconds(rank.for_s)}</li>
          ))}
        </ul>
      </Stage>
      <Arrow name="weights" text={newest ? `weights ${newest}${travelling.length ? "" : `, ${seconds(value.at - Math.max(...value.updates.map((one) => one.ended)))} ago`}` : "weights"} moving={travelling.length > 0} />
    </div>
  );
}

const byVersion = (one: string, other: string) => {
  const [a, b] = [one.split(".").map(Number), other.split(".").map(Number)];
  return a[0]! - b[0]! || a[1]! - b[1]!;
};

function States({ status }: { status: NonNullable<Seen["queue"]>["report"]["status"] }) {
  const states = ["waiting", "leased", "ready", "reserved", "committed"] as const;
  return (
    <>
      <div class="share" aria-hidden="true">
        {states.map((state) => status[state] > 0 && <i key={state} class={state} style={{ flexGrow: status[state] }} title={`${status[state]} ${state}`} />)}
      </div>
      <ol class="states">{states.map((state) => <li key={state}><i class={`patch ${state}`} /> <span class="figure">{number(status[state])}</span> {state}</li>)}</ol>
    </>
  );
}

// One line per worker process with the samples that it holds in the queue, and one per worker that joined from elsewhere.
function Workers({ processes, seen }: { processes: Seen["processes"]; seen: Seen }) {
  const connected = seen.queue?.report.workers ?? [];
  const most = Math.max(1, ...connected.map((worker) => worker.samples));
  const of = (pid: number) => connected.find((worker) => new RegExp(`-${pid}-[0-9a-f]+$`).test(worker.worker)); // how the queue's names end
  const own = processes.map((process) => ({ name: process.record.name, state: process.record.state, held: of(process.record.pid) }));
  const others = connected.filter((worker) => !own.some((one) => one.held === worker)).map((held) => ({ name: held.worker, state: "running", held }));
  return (
    <ul class="workers">
      {[...own, ...others].map(({ name, state, held }) => (
        <li key={name} class={state === "running" ? "worker" : "worker problem"} data-worker={name}>
          <b>{visible(name)}</b>
          {state !== "running" && <span class="state-word">{state}</span>}
          {state === "running" && seen.queue && !held && <span class="state-word">not connected</span>}
          {held && (
            <span class="load" title={held.samples ? `of ${number(held.groups)} ${held.groups === 1 ? "group" : "groups"}, the first taken ${seconds(held.oldest_s)} ago` : "it waits for work"}>
              <i style={{ width: `${(100 * held.samples) / most}%` }} />
              <span class="figure">holds {number(held.samples)} {held.samples === 1 ? "sample" : "samples"}{held.samples > 0 && `, ${seconds(held.oldest_s)}`}</span>
            </span>
          )}
        </li>
      ))}
    </ul>
  );
}

// One card per engine process, whether it is registered, starts, or is gone.
function Engines({ value, newest }: { value: Diagnosis; newest: string | undefined }) {
  const seen = value.observation;
  const processes = seen.processes.filter((process) => process.record.role === "engine").map((process) => process.record.name);
  const others = seen.engines.map((engine) => engine.engine_id.split(".")[0]!).filter((name) => !processes.includes(name));
  const busiest = Math.max(1, ...seen.engines.map((engine) => engine.requests ?? 0));
  return (
    <ul class="engines">
      {[...processes, ...new Set(others)].map((name) => {
        const process = seen.processes.find((one) => one.record.name === name);
        const engine = seen.engines.filter((one) => one.engine_id.split(".")[0] === name).at(-1);
        const update = value.updates.find((one) => one.process === name);
        const gone = process && (process.record.state !== "running" || ["gone", "Z", "X"].includes(process.state));
        const state = gone ? (process.record.state === "running" ? "gone" : process.record.state) : engine ? (engine.answers ? (engine.paused ? "paused" : "") : "does not answer") : "not registered";
        return (
          <li key={name} class={gone || engine?.answers === false ? "engine problem" : "engine"} data-engine={name}>
            <b>{name}</b> <Version version={engine && !gone ? engine.version : ""} newest={newest} />
            {state && <span class="state-word">{state}{gone && process.record.exit !== null ? `, exit ${process.record.exit}` : ""}</span>}
            {!gone && engine && <span class="load" title="requests"><i style={{ width: `${(100 * (engine.requests ?? 0)) / busiest}%` }} /><span class="figure">{engine.requests === 1 ? "1 request" : `${number(engine.requests)} requests`}</span></span>}
            {!gone && update?.stage && <span class="quiet">{visible(update.stage)} of {update.version}, {seconds(value.at - update.began)}</span>}
            {process && process.record.restarts > 0 && <span class="quiet">{process.record.restarts === 1 ? "1 restart" : `${process.record.restarts} restarts`}</span>}
          </li>
        );
      })}
    </ul>
  );
}

// A version, which lights up when it changes.
function Version({ version, newest }: { version: string; newest: string | undefined }) {
  const before = useRef(version);
  const [changed, setChanged] = useState(0);
  useEffect(() => {
    if (version && before.current && before.current !== version) setChanged((old) => old + 1);
    before.current = version;
  }, [version]);
  if (!version) return null;
  return <span class={changed ? "version changed" : "version"} key={changed}>version {version}{newest && behind(version, newest)}</span>;
}

function behind(version: string, newest: string): string {
  if (!/^\d+\.\d+$/.test(version) || byVersion(version, newest) >= 0) return "";
  const [[lineage, step], [newer, last]] = [version.split("."), newest.split(".")];
  return lineage === newer ? `, ${Number(last) - Number(step)} behind` : ", of an older lineage";
}

function Stage({ name, title, note, children }: { name: string; title: string; note: string; children: ComponentChildren }) {
  return <section class={`stage at-${name}`}><h3>{title}</h3><p class="quiet">{note}</p>{children}</section>;
}

function Arrow({ name, text, moving = false, starved = false }: { name: string; text: string; moving?: boolean; starved?: boolean }) {
  return <div class={`arrow at-${name}${moving ? " moving" : ""}${starved ? " starved" : ""}`}><span>{text}</span><i aria-hidden="true" /></div>;
}
