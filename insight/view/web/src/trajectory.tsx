// One trajectory: its rewards, its conversation token by token, its group, and its task over time.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { live, parameters, run as runPath, useKeys, useLoaded } from "./api";
import { keyOf, sameTask } from "./embedded";
import { number, seconds, signed, toolArguments, visible } from "./format";
import { address, go, Missing, type Place } from "./place";
import { Story, Timings } from "./story";
import { Legend, PlainText, PROPERTIES, sameTokens, scaleOf, Strip, TokenText, type Property, type Scale } from "./tokens";
import { Reward } from "./trajectories";
import type { Call, Change, Page, Row, Trajectory, Turn } from "./types";

export function TrajectoryPage({ name, place, change }: { name: string; place: Place; change: Change | undefined }) {
  const [again, setAgain] = useState("");
  const { value, error } = useLoaded<Trajectory>(place.key ? `${runPath(name)}/trajectories/${encodeURIComponent(place.key)}` : null, again);
  const indexed = JSON.stringify(change?.indexed ?? null);
  useEffect(() => {
    if (error) setAgain(indexed); // its file may be read by now
  }, [error, indexed]);
  if (error || !place.key) return <Missing why={visible(error || "the address names no trajectory")} to={{ page: "trajectories", run: name }} title={<>all trajectories of {name}</>} />;
  if (!value) return <main class="page"><p class="quiet">Loading …</p></main>;
  return <Shown key={keyOf(value)} name={name} place={place} trajectory={value} />;
}

function Shown({ name, place, trajectory }: { name: string; place: Place; trajectory: Trajectory }) {
  const tokens = trajectory.tokens;
  const [property, setProperty] = useState<Property>((place.given.color as Property) ?? "trained");
  const given = Number(place.given.token ?? -1);
  const [chosen, setChosen] = useState(Number.isInteger(given) && given < tokens.id.length ? given : -1);
  const scale = useMemo(() => scaleOf(tokens, property), [tokens, property]);
  const group = useLoaded<Page>(`${runPath(name)}/trajectories?${parameters({ partition: trajectory.partition, step: trajectory.step, group: trajectory.grp, order: "oldest" })}`).value?.rows ?? [];
  const choose = (at: number) => {
    if (at < 0 || at >= tokens.id.length) return;
    setChosen(at);
    go({ ...place, given: { ...place.given, token: `${at}`, color: property } }, true);
  };
  const close = () => {
    setChosen(-1);
    go({ ...place, given: { color: property } }, true);
  };
  useEffect(() => document.querySelector(".token.chosen")?.scrollIntoView({ block: "nearest" }), [chosen]);
  const sibling = (by: number) => {
    const index = group.findIndex((row) => keyOf(row) === keyOf(trajectory));
    const next = group[index + by];
    if (index >= 0 && next) go({ page: "trajectory", run: name, key: keyOf(next), given: { color: property } });
  };
  const masked = (by: number) => {
    for (let at = chosen + by; at >= 0 && at < tokens.id.length; at += by) if (tokens.rule[at]) return choose(at);
  };
  const turnOf = (by: number) => {
    const elements = [...document.querySelectorAll<HTMLElement>("article.turn")];
    const now = elements.findIndex((element) => element.getBoundingClientRect().top > 60);
    elements[Math.max(0, Math.min(elements.length - 1, by > 0 ? (now < 0 ? elements.length - 1 : now + (elements[now]!.getBoundingClientRect().top < 90 ? 1 : 0)) : (now < 0 ? elements.length : now) - 1))]?.scrollIntoView({ block: "start" });
  };
  useKeys((key, event) => {
    const moves: Record<string, () => void> = {
      ArrowRight: () => choose(chosen + 1),
      ArrowLeft: () => choose(chosen - 1),
      n: () => masked(1),
      p: () => chosen > 0 && masked(-1),
      "]": () => sibling(1),
      "[": () => sibling(-1),
      j: () => turnOf(1),
      k: () => turnOf(-1),
      g: () => go({ page: "group", run: name, key: `${trajectory.partition}-${trajectory.step}-${trajectory.grp}` }),
      Escape: () => (chosen >= 0 ? close() : history.back()),
    };
    if (!moves[key]) return;
    event.preventDefault();
    moves[key]!();
  });
  return (
    <main class={chosen >= 0 ? "page with-story" : "page"}>
      <section class="body">
        <Head name={name} trajectory={trajectory} group={group} />
        <div class="bar sticky">
          <label>colour by{" "}
            <select aria-label="colour by" value={property} onChange={(event) => setProperty(event.currentTarget.value as Property)}>
              {Object.entries(PROPERTIES).map(([one, title]) => <option value={one} key={one}>{title}</option>)}
            </select>
          </label>
          <Legend scale={scale} />
          <Strip tokens={tokens} scale={scale} chosen={chosen} choose={choose} />
        </div>
        <Conversation name={name} trajectory={trajectory} scale={scale} chosen={chosen} choose={choose} />
        <OverTime name={name} trajectory={trajectory} />
      </section>
      {chosen >= 0 && <Story trajectory={trajectory} at={chosen} close={close} />}
    </main>
  );
}

function Head({ name, trajectory, group }: { name: string; trajectory: Trajectory; group: Row[] }) {
  const heldOut = trajectory.partition === "eval";
  const rules = new Map<string, number>();
  for (const rule of trajectory.tokens.rule) if (rule) rules.set(rule, (rules.get(rule) ?? 0) + 1);
  return (
    <header class="head">
      <h1>
        {heldOut ? `held-out ${trajectory.task}, version ${trajectory.step}` : `step ${trajectory.step}, group ${trajectory.grp}`}
        <span class="quiet"> sample {trajectory.sample}{trajectory.segment ? `, segment ${trajectory.segment}` : ""}{trajectory.role && `, as ${trajectory.role}`}</span>
      </h1>
      <nav class="chips" aria-label="samples of the group">
        {group.map((row) => (
          <a key={keyOf(row)} href={address({ page: "trajectory", run: name, key: keyOf(row) })} aria-current={keyOf(row) === keyOf(trajectory) ? "true" : undefined} title={`sample ${row.sample}`}>
            {row.role && `${row.role} `}<Reward value={row.reward + row.turn_reward} />
          </a>
        ))}
        {group.length > 1 && <a href={address({ page: "group", run: name, key: `${trajectory.partition}-${trajectory.step}-${trajectory.grp}` })}>side by side</a>}
        {live && <a href={`/api/${runPath(name)}/trajectories/${keyOf(trajectory)}`} target="_blank">JSON</a>}
      </nav>
      <dl class="facts">
        <div><dt>reward</dt><dd><Reward value={trajectory.reward + trajectory.turn_reward} />{!trajectory.scored && " not scored"}
          {Object.entries(trajectory.reward_parts).map(([part, value]) => <span class="part" key={part}>{visible(part)} {number(value)}</span>)}</dd></div>
        <div><dt>task</dt><dd>{visible(trajectory.task)}{trajectory.source && ` of ${trajectory.source}`}</dd></div>
        {trajectory.ground_truth && <div><dt>expected</dt><dd class="preview">{visible(trajectory.ground_truth.slice(0, 300))}</dd></div>}
        <div><dt>end</dt><dd>{trajectory.finish}</dd></div>
        <div><dt>tokens</dt><dd>{number(trajectory.tokens.id.length)}, {number(trajectory.sampled)} sampled</dd></div>
        {rules.size > 0 && <div><dt>masked</dt><dd>{[...rules].map(([rule, count]) => `${rule} ${number(count)}`).join(", ")}</dd></div>}
        <div><dt>time</dt><dd><Timings timings={trajectory.timings} /></dd></div>
      </dl>
      {Object.entries(trajectory.reward_reasons).map(([part, reason]) => <section class="reason" key={part}><span class="part">{visible(part)} {number(trajectory.reward_parts[part] ?? trajectory.reward)}</span><PlainText text={reason} /></section>)}
      {trajectory.error && <p class="problem">{visible(trajectory.error)}</p>}
    </header>
  );
}

function Conversation({ name, trajectory, scale, chosen, choose }: { name: string; trajectory: Trajectory; scale: Scale; chosen: number; choose: (at: number) => void }) {
  const { tokens, turns } = trajectory;
  const spelled = tokens.text.some((text) => text !== null);
  const drawn = (from: number, to: number) => <TokenText tokens={tokens} from={from} to={to} scale={scale} chosen={chosen} choose={choose} />;
  const folded = (from: number, to: number) => (
    <details class="folded" open={chosen >= from && chosen < to}>
      <summary>{number(to - from)} {spelled ? "tokens with the template's" : "tokens by their ids"}</summary>
      {drawn(from, to)}
    </details>
  );
  const pictures = (from: number, to: number) =>
    trajectory.media.filter(({ position }) => position >= from && position < to).map(({ sha256, position }) => (
      <img key={position} class="picture" alt={`the image at token ${position}`} src={`/api/${runPath(name)}/trajectories/${keyOf(trajectory)}/${sha256}`} />
    ));
  const covered = turns.some((turn) => turn.end > turn.start);
  return (
    <>
      {!spelled && tokens.id.length > 0 && <p class="quiet">{trajectory.problem || "The model's tokenizer was not found"}. Messages are shown as they were recorded, and tokens by their ids.</p>}
      {framesOf(turns).map((said, index) => {
        const [first, { start, end }] = [said[0]!, said[0]!];
        if (said.length === 1 && spelled && end > start) return <TurnFrame key={index} turn={first}>{pictures(start, end)}{drawn(start, end)}</TurnFrame>;
        return (
          <article key={index} class={frameClass(first)}>
            {said.map((turn, at) => <Said key={at} turn={turn}><PlainText text={turn.text} /></Said>)}
            {pictures(start, end)}
            {end > start && folded(start, end)}
          </article>
        );
      })}
      {!covered && <article class="turn"><header><b>tokens</b></header>{drawn(0, tokens.id.length)}</article>}
    </>
  );
}

// The turns by frame: messages that one prompt added have their tokens in common.
function framesOf(turns: Turn[]): Turn[][] {
  const frames: Turn[][] = [];
  for (const turn of turns) {
    const last = frames.at(-1)?.[0];
    if (last && sameTokens(last, turn)) frames.at(-1)!.push(turn);
    else frames.push([turn]);
  }
  return frames;
}

const frameClass = (turn: Turn) => `turn ${["user", "assistant", "tool", "system"].includes(turn.role) ? turn.role : ""}`;

export function TurnFrame({ turn, children }: { turn: Turn; children: ComponentChildren }) {
  return <article class={frameClass(turn)}><Said turn={turn}>{children}</Said></article>;
}

function Said({ turn, children }: { turn: Turn; children: ComponentChildren }) {
  return (
    <>
      <header>
        <b>{visible(turn.role)}</b>
        {turn.seconds > 0.0005 && <span class="quiet">{seconds(turn.seconds)}</span>}
        {turn.reward !== null && <span class="part">reward {signed(turn.reward)}{turn.reason && ` – ${turn.reason}`}</span>}
      </header>
      {children}
      {turn.tool_calls.map((call, index) => <CallBox key={index} call={call} />)}
    </>
  );
}

function CallBox({ call }: { call: Call }) {
  return (
    <div class={call.error ? "call failed" : "call"}>
      <div class="text"><b>{visible(call.name)}</b>({visible(toolArguments(call.arguments))}) <span class="quiet">{call.seconds > 0 && seconds(call.seconds)}</span>
        {call.reward !== null && <span class="part">reward {signed(call.reward)}{call.reason && ` – ${call.reason}`}</span>}
        {!!call.cut && <span class="part cut" title="the policy saw the beginning (agent.tool_response_tokens)">cut: {number(call.cut)} characters in all</span>}</div>
      {call.error ? <div class="problem"><PlainText text={call.error} /></div> : <PlainText text={call.result} />}
    </div>
  );
}

function OverTime({ name, trajectory }: { name: string; trajectory: Trajectory }) {
  const found = useLoaded<Page>(`${runPath(name)}/trajectories?${sameTask(trajectory)}`).value;
  const rest = (found?.count ?? 0) - (found?.rows.length ?? 0);
  const steps = new Map<string, Row[]>();
  for (const row of found?.rows ?? []) {
    const key = `${row.partition === "eval" ? "version" : "step"} ${row.step}`;
    steps.set(key, [...(steps.get(key) ?? []), row]);
  }
  if (steps.size < 2) return null;
  return (
    <section class="over-time">
      <h2>the same task over time</h2>
      {[...steps].map(([step, rows]) => (
        <div class="chips" key={step}>
          <span class="quiet">{step}</span>
          {rows.map((row) => (
            <a key={keyOf(row)} href={address({ page: "trajectory", run: name, key: keyOf(row) })} aria-current={keyOf(row) === keyOf(trajectory) ? "true" : undefined} title={row.answer}>
              <Reward value={row.reward + row.turn_reward} />
            </a>
          ))}
        </div>
      ))}
      <a href={address({ page: "trajectories", run: name, given: { task: trajectory.task, source: trajectory.source } })}>{rest > 0 ? `all of them, with ${number(rest)} older ones` : "all of them"}</a>
    </section>
  );
}
