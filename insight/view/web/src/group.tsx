// The conversations of a group beside one another.

import { parameters, run as runPath, useKeys, useLoaded } from "./api";
import { keyOf } from "./embedded";
import { number, visible } from "./format";
import { address, Missing, type Place } from "./place";
import { PlainText } from "./tokens";
import { TurnFrame } from "./trajectory";
import { Reward } from "./trajectories";
import type { GroupRow, Page } from "./types";

// How many turns all rows begin with, before any of them was answered.
export function commonTurns(rows: GroupRow[]): number {
  const first = rows[0]!.turns;
  const differs = first.findIndex((turn, at) => turn.role === "assistant" || rows.some((row) => row.turns[at]?.role !== turn.role || row.turns[at]!.text !== turn.text));
  return differs < 0 ? first.length : differs;
}

export function GroupPage({ name, place }: { name: string; place: Place }) {
  const { value, error } = useLoaded<GroupRow[]>(place.key ? `${runPath(name)}/groups/${encodeURIComponent(place.key)}` : null);
  const [partition = "", step = "", group = ""] = place.key.split("-");
  const wanted = { partition, step, group };
  const all = useLoaded<Page>(`${runPath(name)}/trajectories?${parameters({ ...wanted, limit: 1 })}`).value;
  useKeys((key) => key === "Escape" && history.back());
  const why = error || (place.key ? value?.length === 0 && "this group is not in the report" : "the address names no group");
  if (why) return <Missing why={visible(why)} to={{ page: "trajectories", run: name }} title={<>all trajectories of {name}</>} />;
  if (!value) return <main class="page"><p class="quiet">Loading …</p></main>;
  const first = value[0]!;
  const opening = first.turns.slice(0, commonTurns(value));
  const count = all?.count ?? value.length;
  return (
    <main class="page">
      <h1>{first.partition === "eval" ? `held-out ${first.task}, version ${first.step}` : `step ${first.step}, group ${first.grp}`} <span class="quiet">{visible(first.task)}, {number(count)} rows</span></h1>
      {count > value.length && <p class="problem">Only the first {number(value.length)} of them are here; <a href={address({ page: "trajectories", run: name, given: wanted })}>all of them</a></p>}
      {opening.map((turn, index) => <TurnFrame key={index} turn={turn}><PlainText text={turn.text} /></TurnFrame>)}
      <div class="columns">
        {value.map((row) => (
          <section key={keyOf(row)}>
            <h2>
              <a href={address({ page: "trajectory", run: name, key: keyOf(row) })}>sample {row.sample}{row.segment ? `.${row.segment}` : ""}{row.role && `, ${row.role}`}</a> <Reward value={row.reward + row.turn_reward} />
              <span class="quiet"> {row.advantage !== null && `advantage ${number(row.advantage)}`}{row.masked ? `, ${number(row.masked)} masked` : ""}</span>
            </h2>
            {row.error_text && <p class="problem">{visible(row.error_text)}</p>}
            {row.turns.slice(opening.length).map((turn, index) => <TurnFrame key={index} turn={turn}><PlainText text={turn.text} /></TurnFrame>)}
          </section>
        ))}
      </div>
    </main>
  );
}
