// The shell: which page of which run is shown, and the list of runs.

import { render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { get, live, useChanges, useKeys } from "./api";
import { ChatPage } from "./chat";
import { EvaluationPage } from "./evaluation";
import { FlowPage } from "./flow";
import { number, visible } from "./format";
import { RunPage } from "./run";
import { TrajectoriesPage } from "./trajectories";
import { TrajectoryPage } from "./trajectory";
import { GroupPage } from "./group";
import { address, go, Missing, parse } from "./place";
import type { RunSummary } from "./types";

const PAGES = { run: "Run", trajectories: "Trajectories", evaluation: "Evaluation", ...(live && { flow: "Flow", chat: "Chat" }) };
const PLACES = [...Object.keys(PAGES), "trajectory", "group"];

function App() {
  const [place, setPlace] = useState(parse(location.hash));
  const [listed, setRuns] = useState<RunSummary[] | null>(null); // null: not loaded yet
  const [error, setError] = useState("");
  const [help, setHelp] = useState(false);
  const changes = useChanges();
  useEffect(() => {
    const listen = () => setPlace(parse(location.hash));
    window.addEventListener("hashchange", listen);
    listen();  // the address may have changed between the first drawing and this
    window.addEventListener("popstate", listen);
    return () => {
      window.removeEventListener("hashchange", listen);
      window.removeEventListener("popstate", listen);
    };
  }, []);
  useEffect(() => {
    const put = (found: RunSummary[]) => {
      setRuns(found);
      setError("");
    };
    get<RunSummary[]>("runs").then(put, (problem: Error) => setError(problem.message));
  }, [changes]);
  const runs = listed ?? [];
  const name = place.run || runs[0]?.name || "";
  const others = useMemo(() => (place.given.with ?? "").split(",").filter(Boolean), [place.given.with]);
  useKeys((key) => {
    const pages = Object.keys(PAGES);
    if (key === "?") setHelp(!help);
    else if (key === "Escape" && help) setHelp(false);
    else if (pages[Number(key) - 1]) go({ page: pages[Number(key) - 1]!, run: name });
  });
  if (!name && error) return <main class="page"><p class="problem">{error}</p></main>;
  if (!name) return <main class="page"><p class="quiet">{listed ? "There is no run here yet." : "Loading …"}</p></main>;
  const summary = runs.find((run) => run.name === name);
  const at = { ...place, run: name };
  const unknown = listed !== null && !summary;
  const shown = unknown ? "" : place.page;
  const tab = place.page === "trajectory" || place.page === "group" ? "trajectories" : place.page;
  return (
    <>
      <header class="top">
        <a class="brand" href={address({ page: "run", run: name })}>rl-async</a>
        <RunPicker runs={runs} chosen={name} page={tab} />
        <nav aria-label="pages">
          {Object.entries(PAGES).map(([page, title]) => (
            <a href={address({ page, run: name })} aria-current={tab === page ? "page" : undefined} key={page}>{title}</a>
          ))}
        </nav>
        <span class="state">
          {summary && <State run={summary} />}
          <button class="plain" title="keys (?)" aria-label="keys" onClick={() => setHelp(!help)}>?</button>
        </span>
      </header>
      {help && <Keys />}
      {error && <p class="problem page">{error}</p>}
      {unknown && <Missing why={<>there is no run <b>{visible(name)}</b></>} to={{ page: "run", run: runs[0]?.name ?? "" }} title={runs[0] ? <>the newest is {runs[0].name}</> : "all runs"} />}
      {!unknown && !PLACES.includes(place.page) && <Missing why={<>there is no page <b>{visible(place.page)}</b></>} to={{ page: "run", run: name }} title={<>the run {name}</>} />}
      {shown === "run" && <RunPage name={name} runs={runs} others={others} changes={changes} place={at} />}
      {shown === "trajectories" && <TrajectoriesPage name={name} place={at} change={changes[name]} />}
      {shown === "trajectory" && <TrajectoryPage name={name} place={at} change={changes[name]} />}
      {shown === "group" && <GroupPage name={name} place={at} />}
      {shown === "evaluation" && <EvaluationPage name={name} runs={runs} place={at} change={changes[name]} />}
      {shown === "flow" && live && <FlowPage name={name} running={summary?.running ?? false} />}
      {shown === "chat" && live && <ChatPage name={name} />}
    </>
  );
}

function RunPicker({ runs, chosen, page }: { runs: RunSummary[]; chosen: string; page: string }) {
  return (
    <select aria-label="run" value={chosen} onChange={(event) => go({ page, run: event.currentTarget.value })}>
      {runs.map((run) => <option value={run.name} key={run.name}>{run.name}{run.running ? " ●" : ""}</option>)}
    </select>
  );
}

function State({ run }: { run: RunSummary }) {
  const done = run.steps ? Math.min(1, run.steps_done / run.steps) : 0;
  return (
    <span class="progress" title={run.folder}>
      <span class={run.running ? "dot running" : "dot"} />
      <span>{!live ? "report" : run.running ? "running" : run.finished ? "finished" : "stopped"}</span>
      {run.steps > 0 && <progress value={done} max={1} aria-label="steps" />}
      {run.steps > 0 && <span class="figure">{number(run.steps_done)} / {number(run.steps)}</span>}
    </span>
  );
}

function Keys() {
  const keys: [string, string][] = [
    ["1 – 5", "pages"],
    ["/", "search"],
    ["j  k", "next and previous row or turn"],
    ["Enter", "open"],
    ["[  ]", "previous and next sample of the group"],
    ["←  →", "previous and next token"],
    ["n  p", "next and previous masked token"],
    ["g", "group side by side"],
    ["←  →", "timeline: earlier and later"],
    ["+  −  0", "timeline: zoom in and out, whole run"],
    ["f", "timeline: follow the newest steps"],
    ["j  k", "timeline: next and previous of a kind"],
    ["Esc", "back, or close"],
  ];
  return <dl class="keys">{keys.map(([key, what]) => <div key={key}><dt>{key}</dt><dd>{what}</dd></div>)}</dl>;
}

render(<App />, document.getElementById("app")!);
