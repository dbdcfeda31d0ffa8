// The curves of a run, of several over each other, and their configs.

import { Fragment } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, parameters, run as runPath, useKeys, useOfRuns, type OfRuns } from "./api";
import { Chart, type Series } from "./charts";
import { lasted, number, visible } from "./format";
import { go, type Place } from "./place";
import type { Change, Column, Config, Evaluations, Metrics, RunSummary } from "./types";

// What is worth a look first: a title, and metrics of which those that the run has are drawn in one card.
const CARDS: [string, string[]][] = [
  ["reward", ["reward/mean"]],
  ["entropy", ["loss/entropy"]],
  ["perplexity of sampled tokens", ["correction/ppl_policy"]],
  ["loss", ["loss/policy", "loss/train"]],
  ["response tokens", ["rollout/response_tokens_mean"]],
  ["time per step (s)", ["time/step_s"]],
  ["waiting for a batch (s)", ["time/wait_batch_s"]],
  ["updating (s)", ["time/update_s"]],
  ["syncing weights (s)", ["time/sync_s"]],
  ["tokens per second", ["tokens/per_s"]],
  ["staleness, mean", ["staleness/mean"]],
  ["gradient norm", ["loss/grad_norm"]],
  ["KL between engine and trainer", ["correction/kl"]],
  ["effective sample size", ["correction/ess"]],
  ["share masked", ["correction/masked"]],
  ["mismatch after a publication", ["mismatch/mean"]],
  ["groups ready", ["queue/ready_groups"]],
  ["failed tool calls", ["rollout/tool_errors_mean"]],
  [
    "failed attempts at episodes",
    [
      "rollout/failed_attempts",
      "rollout/failed_attempts/EpisodeTimeout",
      "rollout/failed_attempts/EngineLost",
      "rollout/failed_attempts/EnvironmentFailed",
      "rollout/failed_attempts/lost_worker",
    ],
  ],
  ["share of episodes out of time", ["rollout/timeout_fraction"]],
];
const MOST = 24; // cards of a search
// Why a card may be empty though steps were trained.
const UNMEASURED: Record<string, string> = { entropy: "not measured while algorithm.entropy_coef is 0; the perplexity is" };

interface Kept {
  epoch: number;
  steps: number[];
  columns: Record<string, Column>;
  names: string[];
}

// The columns `keys` of several runs, extended whenever one of them has new steps.
function useMetrics(names: string[], keys: string[], changes: Record<string, Change>): OfRuns<Kept> {
  const [kept, setKept] = useState<Record<string, Kept>>({});
  const [errors, setErrors] = useState<Record<string, string>>({});
  const held = useRef<{ keys: string; runs: Record<string, Kept> }>({ keys: "", runs: {} });
  const signature = keys.join(",");
  const state = names.map((name) => `${name} ${changes[name]?.epoch} ${changes[name]?.count}`).join(",");
  useEffect(() => {
    let current = true;
    if (held.current.keys !== signature) held.current = { keys: signature, runs: {} };
    const runs = held.current.runs;
    for (const name of names) {
      const old = runs[name];
      const query = parameters({ keys: signature, epoch: old?.epoch ?? -1, after: old?.steps.length ?? 0 });
      get<Metrics>(`${runPath(name)}/metrics?${query}`).then((fresh) => {
        if (!current) return;
        const base = old && fresh.begin > 0 ? old : { steps: [], columns: {} as Record<string, Column> };
        const columns = Object.fromEntries(
          Object.entries(fresh.columns).map(([key, column]) => [
            key,
            [...(base.columns[key] ?? base.steps.map(() => null)), ...column],
          ]),
        );
        runs[name] = { epoch: fresh.epoch, steps: [...base.steps, ...fresh.steps], columns, names: fresh.names };
        setKept({ ...runs });
        setErrors((before) => ({ ...before, [name]: "" }));
      }, (error: Error) => current && setErrors((before) => ({ ...before, [name]: error.message })));
    }
    return () => {
      current = false;
    };
  }, [signature, state]);
  return { values: kept, errors };
}

// Why something of a run cannot be shown.
function Problems({ errors }: { errors: Record<string, string> }) {
  return <>{Object.entries(errors).map(([name, error]) => error && <p class="problem" key={name}>{name}: {error}</p>)}</>;
}

export const runColour = (index: number) => `--run-${index % 8}`;

export function RunPage({ name, runs, others, changes, place }: {
  name: string;
  runs: RunSummary[];
  others: string[];
  changes: Record<string, Change>;
  place: Place;
}) {
  const [search, setSearch] = useState("");
  const [smooth, setSmooth] = useState(0);
  const [log, setLog] = useState(false);
  const field = useRef<HTMLInputElement>(null);
  const compared = [name, ...others.filter((other) => other !== name && runs.some((run) => run.name === other))];
  const shown = runs.find((run) => run.name === name);
  const [names, setNames] = useState<string[]>([]);
  const cards = useMemo(() => chosen(search, names), [search, names]);
  const { values: kept, errors } = useMetrics(compared, cards.flatMap(([, keys]) => keys), changes);
  useEffect(() => {
    const found = [...new Set(compared.flatMap((one) => kept[one]?.names ?? []))];
    if (found.length !== names.length) setNames(found);
  }, [kept]);
  useKeys((key, event) => {
    if (key === "/") {
      event.preventDefault();
      field.current?.focus();
    } else if (key === "Escape") setSearch("");
  });
  const toggle = (other: string) => {
    const next = others.includes(other) ? others.filter((one) => one !== other) : [...others, other];
    go({ ...place, page: "run", run: name, given: { ...place.given, with: next.join(",") } }, true);
  };
  const open = (partition: string) => (step: number) =>
    go({ page: "trajectories", run: name, given: { partition, step_from: `${step}`, step_to: `${step}`, order: "reward_low" } });
  return (
    <main class="page with-side">
      <aside class="side">
        <RunList runs={runs} compared={compared} name={name} toggle={toggle} />
      </aside>
      <section class="body">
        {shown && <About run={shown} />}
        <div class="bar">
          <input ref={field} type="search" placeholder={`search ${names.length || ""} metrics  ( / )`} value={search} aria-label="search metrics"
            onInput={(event) => setSearch(event.currentTarget.value)} />
          <label>smooth <input type="range" min={0} max={0.95} step={0.05} value={smooth} onInput={(event) => setSmooth(Number(event.currentTarget.value))} /></label>
          <label><input type="checkbox" checked={log} onChange={() => setLog(!log)} /> log</label>
          <span class="quiet">Click a step for its trajectories, drag to zoom.</span>
        </div>
        <Problems errors={errors} />
        <div class="charts">
          {cards.map(([title, keys], index) => (
            <Fragment key={title}>
              <Chart title={title} smooth={smooth} log={log} series={seriesOf(compared, keys, kept)} missing={UNMEASURED[title]} open={open("train")} />
              {!search && !index && <EvaluationChart compared={compared} changes={changes} open={open("eval")} />}
            </Fragment>
          ))}
        </div>
        {search && !cards.length && <p class="quiet">No metric has “{search}” in its name.</p>}
        <Configs compared={compared} />
      </section>
    </main>
  );
}

// What the run is: the header of its page.
function About({ run }: { run: RunSummary }) {
  const state = run.running ? "running" : run.finished ? "finished" : "stopped";
  const facts: [string, string, string?][] = [
    ["state", run.steps ? `${state}, ${number(run.steps_done)} of ${number(run.steps)} steps` : state],
    ["model", run.model],
    ["data", run.data],
    ["algorithm", run.algorithm],
    ["mode", run.mode],
    ["commit", run.commit.replace(/^([0-9a-f]{10})[0-9a-f]+/, "$1"), run.commit],
    ["started", run.started ? new Date(run.started * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : ""],
    ["duration", run.started && run.ended ? lasted(run.ended - run.started) : ""],
  ];
  return (
    <dl class="facts about" aria-label="about the run">
      {facts.map(([name, value, title]) => value && <div key={name}><dt>{name}</dt><dd title={title ?? value}>{visible(value)}</dd></div>)}
    </dl>
  );
}

function chosen(search: string, names: string[]): [string, string[]][] {
  if (!search) return names.length ? CARDS.filter(([, keys]) => keys.some((key) => names.includes(key))) : CARDS;
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = names.filter((metric) => words.every((word) => metric.toLowerCase().includes(word)));
  return found.slice(0, MOST).map((metric) => [metric, [metric]]);
}

function seriesOf(compared: string[], keys: string[], kept: Record<string, Kept>): Series[] {
  return compared.flatMap((one, index) =>
    keys.flatMap((key) => {
      const column = kept[one]?.columns[key];
      // The trainer records 0 for an entropy that it did not compute.
      if (key === "loss/entropy" && column?.every((value) => !value)) return [];
      return column ? [{ label: one, colour: runColour(index), xs: kept[one]!.steps, ys: column }] : [];
    }),
  );
}

function EvaluationChart({ compared, changes, open }: { compared: string[]; changes: Record<string, Change>; open: (step: number) => void }) {
  const state = compared.map((name) => `${name} ${changes[name]?.evaluations}`).join(",");
  const { values: found, errors } = useOfRuns<Evaluations>(compared, "evaluations", state);
  const series = compared.flatMap((name, index) => {
    const records = found[name]?.records ?? [];
    const ys = records.map((record) => record["eval/reward"] ?? record["eval/loss"] ?? null);
    return records.length ? [{ label: name, colour: runColour(index), xs: records.map((r) => r["eval/step"]!), ys, points: true }] : [];
  });
  return <><Problems errors={errors} />{series.length > 0 && <Chart title="evaluation" series={series} open={open} />}</>;
}

function RunList({ runs, compared, name, toggle }: {
  runs: RunSummary[];
  compared: string[];
  name: string;
  toggle: (name: string) => void;
}) {
  const [search, setSearch] = useState("");
  const shown = runs.filter((run) => run.name.toLowerCase().includes(search.toLowerCase()));
  return (
    <>
      {runs.length > 8 && <input type="search" placeholder="search runs" aria-label="search runs" value={search} onInput={(event) => setSearch(event.currentTarget.value)} />}
      <ul class="runs">
        {shown.map((run) => {
          const index = compared.indexOf(run.name);
          return (
            <li key={run.name}>
              <label title={run.folder}>
                <input type="checkbox" checked={index >= 0} disabled={run.name === name} onChange={() => toggle(run.name)} />
                <span class="swatch" style={index >= 0 ? { background: `var(${runColour(index)})` } : {}} />
                <span class="name">{run.name}</span>
                <span class="figure">{number(run.reward)}</span>
              </label>
              {run.problem && <p class="problem">{run.problem}</p>}
            </li>
          );
        })}
      </ul>
    </>
  );
}

function Configs({ compared }: { compared: string[] }) {
  const [search, setSearch] = useState("");
  const { values: configs, errors } = useOfRuns<Config>(compared, "config");
  const shown = compared.filter((name) => configs[name]);
  const keys = [...new Set(shown.flatMap((name) => Object.keys(configs[name]!)))].sort();
  const text = (name: string, key: string) => (key in configs[name]! ? JSON.stringify(configs[name]![key]) : "—");
  const differ = (key: string) => new Set(shown.map((name) => text(name, key))).size > 1;
  const matching = keys.filter((key) => (search ? `${key} ${shown.map((name) => text(name, key))}`.toLowerCase().includes(search.toLowerCase()) : shown.length < 2 || differ(key)));
  return (
    <details class="config" open={shown.length > 1}>
      <summary>{shown.length > 1 ? `config: ${matching.length} keys differ` : "config"}</summary>
      <input type="search" placeholder="search keys and values" aria-label="search config" value={search} onInput={(event) => setSearch(event.currentTarget.value)} />
      <Problems errors={errors} />
      <div class="scroll">
        <table>
          <thead><tr><th>key</th>{shown.map((name) => <th key={name}>{name}</th>)}</tr></thead>
          <tbody>
            {matching.map((key) => (
              <tr key={key} class={shown.length > 1 && differ(key) ? "differs" : ""}>
                <th scope="row">{key}</th>
                {shown.map((name) => <td key={name}>{text(name, key)}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

