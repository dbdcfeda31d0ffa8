// What became of one token, in words and numbers.

import { number, seconds, signed, tokenLabel, visible } from "./format";
import { sameTokens, valueOf } from "./tokens";
import type { Trajectory, Turn } from "./types";

const RULES: Record<string, string> = {
  band: "its weight left the band, so it counts 0",
  max_age: "it was sampled by weights that are too old (max_age)",
  veto: "some token of its row was so unlikely for the trainer that the whole row is left out (veto)",
  max_staleness: "it is staler than the queue allows (max_staleness)",
  overlong_filter: "its row was cut off at the longest length (overlong_filter)",
  greedy: "its row was sampled greedily as the baseline, and never trains",
  correction: "a correction of your own masked it",
};
const MEASURES: Record<string, string> = { k1: "ratio r", k2: "log(r)² / 2", k3: "r − 1 − log r" };

function why(rule: string): string {
  if (RULES[rule]) return RULES[rule]!;
  const [level, measure = ""] = [rule.slice(0, rule.lastIndexOf("_")), rule.slice(rule.lastIndexOf("_") + 1)];
  const of = MEASURES[measure] ?? measure;
  const what = { token: `its ${of}`, seq_sum: `the sum of its row's ${of}`, seq_mean: `the mean of its row's ${of}`, seq_max: `the largest ${of} of its row` }[level];
  return what ? `${what} is outside the limits of algorithm.correction (${rule})` : rule;
}

// What a token is that the policy did not sample, by the turns that have it.
function partOf(said: Turn[]): string {
  const [first, ...others] = said;
  if (!first) return "part of the chat template or of a tool's answer";
  if (others.length) return `part of the prompt, in which the template puts ${number(said.length)} messages together`;
  return first.role === "assistant" ? "part of the template around the answer" : `what the ${first.role} said`;
}

export function Story({ trajectory, at, close }: { trajectory: Trajectory; at: number; close: () => void }) {
  const tokens = trajectory.tokens;
  const [text, id, version] = [tokens.text[at] ?? null, tokens.id[at]!, tokens.version[at] ?? null];
  const [engine, trainer] = [tokens.logprob[at] ?? null, tokens.trained_logprob[at] ?? null];
  const [weight, advantage, rule] = [tokens.weight[at] ?? null, tokens.advantage[at] ?? null, tokens.rule[at] ?? null];
  const [ratio, staleness] = [valueOf(tokens, "ratio", at), tokens.staleness[at] ?? null];
  const turn = tokens.turn[at] ?? null;
  const said = turn === null ? [] : trajectory.turns.filter((one, number) => number === turn || sameTokens(one, trajectory.turns[turn]!));
  const facts: [string, string][] = [
    ["id", `${id}`],
    ["place", `${at} of ${tokens.id.length}`],
    ["in", turn === null ? "no turn" : said.length > 1 ? `the prompt of ${said.map((one) => one.role).join(", ")}` : `turn ${turn}, ${said[0]!.role}`],
  ];
  if (version)
    facts.push(
      ["version", `${version[1]}${version[0] ? ` of lineage ${version[0]}` : ""}`],
      ["staleness", staleness === null ? "held out" : `${staleness}`],
      ["log p, engine", number(engine, 4)],
      ["log p, trainer", number(trainer, 4)],
      ["ratio", number(ratio, 4)],
      ["weight", number(weight, 4)],
      ["advantage", advantage === null ? "–" : signed(advantage)],
    );
  return (
    <section class="story" aria-live="polite" aria-label="the story of a token">
      <header>
        <code class="label">{visible(tokenLabel(text, id))}</code>
        <button class="plain" onClick={close} aria-label="close">×</button>
      </header>
      <ol>
        {!version && <li>The policy did not sample it: it is {partOf(said)}. It never trains.</li>}
        {version && (
          <li>
            Weights of <b>version {version[1]}</b> sampled it with probability <b>{number(engine === null ? null : Math.exp(engine))}</b>
            {tokens.constrained[at] && " under a grammar, among the tokens that it allowed"}
            {trajectory.sampling.temperature !== 1 && ` at temperature ${trajectory.sampling.temperature}`}.
          </li>
        )}
        {version && staleness !== null && (
          <li>Step {trajectory.step} trained its row, {staleness === 0 ? "with the same weights" : <><b>{staleness}</b> {staleness === 1 ? "step" : "steps"} later</>}.</li>
        )}
        {trainer !== null && (
          <li>
            The trainer gave it <b>{number(Math.exp(trainer))}</b>: {ratio === null ? "a ratio would say nothing, since no grammar restricts the trainer" : Math.abs(ratio - 1) < 0.005 ? "the same" : <>a ratio of <b>{number(ratio)}</b></>}
            {ratio !== null && staleness === 0 && Math.abs(ratio - 1) > 0.1 ? ", although the weights are the same: engine and trainer disagree" : ""}.
          </li>
        )}
        {rule && <li class="problem">It was <b>{rule === "band" ? "given weight 0" : "masked"}</b>: {why(rule)}.</li>}
        {version && !rule && weight !== null && <li>It counts with weight <b>{number(weight)}</b>.</li>}
        {version && advantage !== null && (
          <li>
            Its advantage is <b>{signed(advantage)}</b>
            {advantage === 0 || weight === 0 || rule ? ": it changes nothing" : `: the policy loss pushed the token's probability ${advantage > 0 ? "up" : "down"}, unless its clipping held it`}.
          </li>
        )}
        {version && !trajectory.explained && (
          <li>{trajectory.partition === "eval" ? "It is a held-out answer, which nothing trained." : "How it was trained was not recorded."}</li>
        )}
      </ol>
      <dl>{facts.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
    </section>
  );
}

export function Timings({ timings }: { timings: Record<string, number> }) {
  return <>{Object.entries(timings).map(([name, value]) => `${name} ${seconds(value)}`).join(", ")}</>;
}
