// Who waits for whom: the loop as a drawing, and doctor's verdict.

import { useEffect, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { live, run as runPath, useLoaded } from "./api";
import { number, seconds, visible } from "./format";
import type { Diagnosis } from "./types";

const AGAIN_MS = 4000;

export function FlowPage({ name }: { name: string }) {
  const [at, setAt] = useState(0);
  useEffect(() => {
    const timer = live ? setInterval(() => setAt((old) => old + 1), AGAIN_MS) : undefined;
    return () => clearInterval(timer);
  }, []);
  const { value, error } = useLoaded<Diagnosis>(`${runPath(name)}/diagnosis`, at);
  if (error) return <main class="page"><p class="problem">{error}</p></main>;
  if (!value) return <main class="page"><p class="quiet">Asking every process …</p></main>;
  const seen = value.observation;
  const [first, ...others] = value.verdict.findings;
  const ended = seen.launcher === null;
  return (
    <main class="page">
      <section class={`verdict ${value.verdict.health}`}>
        <b>{value.verdict.health === "over" ? "finished" : value.verdict.health}</b> {visible(first ?? "")}
        {others.length > 0 && <ul>{others.map((one) => <li key={one}>{visible(one)}</li>)}</ul>}
      </section>
      {!ended && <Loop seen={seen} />}
      {value.verdict.waits.length > 0 && (
        <section><h2>who waits for whom</h2><ul>{value.verdict.waits.map((one) => <li key={one}>{visible(one)}</li>)}</ul></section>
      )}
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
      {seen.trouble.map((one) => <p class="quiet" key={one}>could not be observed: {visible(one)}</p>)}
    </main>
  );
}

function Loop({ seen }: { seen: Diagnosis["observation"] }) {
  const status = seen.queue?.report.status;
  const workers = seen.processes.filter((process) => ["worker", "gateway"].includes(process.record.role));
  return (
    <div class="loop">
      <Stage title="queue" note={status ? `${status.slots_used} of ${status.slots} slots used` : "no answer"}>
        {status && (
          <ol class="states">
            {(["waiting", "leased", "ready", "reserved", "committed"] as const).map((state) => (
              <li key={state}><span class="figure">{number(status[state])}</span> {state}</li>
            ))}
          </ol>
        )}
      </Stage>
      <Arrow text="tasks" />
      <Stage title="agent workers" note={`${workers.length} started${status ? `, ${status.workers} connected` : ""}`}>
        {seen.queue && <p><span class="figure">{number(seen.queue.report.rates.rows)}</span> rows per second</p>}
      </Stage>
      <Arrow text="prompts ⇄ tokens" />
      <Stage title="engines" note={seen.engines.length ? "" : "none registered"}>
        <ul>
          {seen.engines.map((engine) => (
            <li key={engine.engine_id} class={engine.answers ? "" : "problem"}>
              {engine.engine_id}: {engine.answers ? (engine.paused ? "paused" : `${number(engine.requests)} requests`) : "does not answer"}, version {engine.version}
            </li>
          ))}
        </ul>
      </Stage>
      <Arrow text="weights" back />
      <Stage title="trainer" note={`${number(seen.steps_done)} of ${number(seen.steps)} steps${seen.usual_step_s ? `, ${seconds(seen.usual_step_s)} each` : ""}`}>
        <ul>{seen.ranks.map((rank) => <li key={rank.rank}>rank {rank.rank}: {rank.phase} of step {rank.step}, for {seconds(rank.for_s)}</li>)}</ul>
      </Stage>
    </div>
  );
}

function Stage({ title, note, children }: { title: string; note: string; children: ComponentChildren }) {
  return <section class="stage"><h3>{title}</h3><p class="quiet">{note}</p>{children}</section>;
}

function Arrow({ text, back = false }: { text: string; back?: boolean }) {
  return <div class={back ? "arrow back" : "arrow"}><span>{text}</span></div>;
}
