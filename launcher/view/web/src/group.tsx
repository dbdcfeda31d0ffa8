// The conversations of a group beside one another.

import { run as runPath, useKeys, useLoaded } from "./api";
import { keyOf } from "./embedded";
import { number, visible } from "./format";
import { address, type Place } from "./main";
import { PlainText } from "./tokens";
import { TurnFrame } from "./trajectory";
import { Reward } from "./trajectories";
import type { GroupRow } from "./types";

export function GroupPage({ name, place }: { name: string; place: Place }) {
  const { value, error } = useLoaded<GroupRow[]>(`${runPath(name)}/groups/${place.key}`);
  useKeys((key) => key === "Escape" && history.back());
  if (error) return <main class="page"><p class="problem">{error}</p></main>;
  if (!value?.length) return <main class="page"><p class="quiet">Loading …</p></main>;
  const first = value[0]!;
  const opening = first.turns.filter((turn, at) => value.every((row) => row.turns[at]?.text === turn.text && row.turns.slice(0, at + 1).every((one) => one.role !== "assistant")));
  return (
    <main class="page">
      <h1>{first.partition === "eval" ? `held-out ${first.task}, version ${first.step}` : `step ${first.step}, group ${first.grp}`} <span class="quiet">{visible(first.task)}, {value.length} rows</span></h1>
      {opening.map((turn, index) => <TurnFrame key={index} turn={turn}><PlainText text={turn.text} /></TurnFrame>)}
      <div class="columns">
        {value.map((row) => (
          <section key={keyOf(row)}>
            <h2>
              <a href={address({ page: "trajectory", run: name, key: keyOf(row) })}>sample {row.sample}{row.segment ? `.${row.segment}` : ""}</a> <Reward value={row.reward + row.turn_reward} />
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
