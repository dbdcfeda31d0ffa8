// The recorded trajectories of a run: search, filters, order, pages.

import { useEffect, useRef, useState } from "preact/hooks";
import { live, parameters, run as runPath, useKeys, useLoaded } from "./api";
import { keyOf } from "./embedded";
import { number, visible } from "./format";
import { address, go, type Place } from "./place";
import { Usage } from "./usage";
import type { Change, Choices, Page, Row, RowGroup } from "./types";

const PAGE = 50;
const ORDERS: Record<string, string> = {
  newest: "newest first",
  oldest: "oldest first",
  reward_low: "lowest reward",
  reward_high: "highest reward",
  masked: "most masked tokens",
  difference: "largest difference of engine and trainer",
  weight: "smallest weight",
  tokens: "longest",
  seconds: "slowest",
  failed_calls: "most failed calls",
};
const FLAGS: Record<string, string> = { error: "error", failed_call: "failed call", unparsed: "call not parsed", masked: "masked tokens" };

export function TrajectoriesPage({ name, place, change }: { name: string; place: Place; change: Change | undefined }) {
  const given = place.given;
  const [text, setText] = useState(given.text ?? "");
  const [at, setAt] = useState(0);
  const field = useRef<HTMLInputElement>(null);
  const indexed = change?.indexed ? `${change.indexed.indexed}/${change.indexed.files}` : "";
  const choices = useLoaded<Choices>(`${runPath(name)}/choices`, indexed);
  const { value: page, error, stale } = useLoaded<Page>(`${runPath(name)}/trajectories?${parameters({ limit: PAGE, ...given })}`, indexed);
  const [where, setWhere] = useState(given.where ?? "");
  useEffect(() => setWhere(given.where ?? ""), [given.where]);
  const set = (changes: Record<string, string>) => {
    setAt(0);
    go({ ...place, given: { ...given, offset: "", ...changes } }, true);
  };
  // What the address says is taken over unless it came from this field, where more may have been typed meanwhile.
  const sent = useRef(text);
  useEffect(() => {
    if ((given.text ?? "") !== sent.current) setText((sent.current = given.text ?? ""));
  }, [given.text]);
  useEffect(() => {
    const timer = setTimeout(() => text !== (given.text ?? "") && set({ text: (sent.current = text) }), 250);
    return () => clearTimeout(timer);
  }, [text, address(place)]);
  const rows = page?.rows ?? [];
  const shown = page?.groups?.length ?? rows.length;
  const offset = Number(given.offset ?? 0);
  const turn = (by: number) => set({ offset: `${Math.max(0, offset + by * PAGE)}` });
  useKeys((key, event) => {
    if (key === "/") {
      event.preventDefault();
      field.current?.focus();
    } else if (key === "j") setAt(Math.min(rows.length - 1, at + 1));
    else if (key === "k") setAt(Math.max(0, at - 1));
    else if (key === "Enter" && rows[at]) go({ page: "trajectory", run: name, key: keyOf(rows[at]!) });
    else if (key === "Escape" && Object.keys(given).length) go({ page: "trajectories", run: name }, true);
  });
  useEffect(() => document.querySelector("tr.at")?.scrollIntoView({ block: "nearest" }), [at]);
  const progress = choices.value?.progress;
  return (
    <main class="page">
      <div class="bar filters">
        <input ref={field} class="wide" type="search" placeholder="search what was said, called and returned  ( / )" aria-label="search trajectories" value={text} onInput={(event) => setText(event.currentTarget.value)} />
        <Select label="set" value={given.partition} set={(partition) => set({ partition })} options={(choices.value?.partition ?? []).map((c) => [c.value, `${c.value === "eval" ? "held out" : "trained"} (${number(c.rows)})`])} />
        <Range label="step" given={given} name="step" set={set} hint={choices.value?.steps ?? [null, null]} />
        <Range label="reward" given={given} name="reward" set={set} hint={[null, null]} />
        <Select label="source" value={given.source} set={(source) => set({ source })} options={(choices.value?.source ?? []).map((c) => [c.value, `${c.value} (${number(c.rows)})`])} />
        <Select label="tool" value={given.tool} set={(tool) => set({ tool })} options={(choices.value?.tool ?? []).filter((c) => c.value).map((c) => [c.value, `${c.value} (${number(c.failed)} of ${number(c.calls)} failed)`])} />
        <Select label="engine" value={given.engine} set={(engine) => set({ engine })} options={(choices.value?.engine ?? []).map((c) => [c.value, `${c.value} (${number(c.rows)})`])} />
        <Select label="end" value={given.finish} set={(finish) => set({ finish })} options={(choices.value?.finish ?? []).map((c) => [c.value, `${c.value} (${number(c.rows)})`])} />
        <Select label="masked by" value={given.rule} set={(rule) => set({ rule })} options={(choices.value?.rule ?? []).map((c) => [c.value, `${c.value} (${number(c.tokens)} tokens)`])} />
        {Object.entries(FLAGS).map(([flag, title]) => (
          <label key={flag}><input type="checkbox" checked={!!given[flag]} onChange={() => set({ [flag]: given[flag] ? "" : "1" })} /> {title}</label>
        ))}
        <select aria-label="order" value={given.order ?? "newest"} onChange={(event) => set({ order: event.currentTarget.value })}>
          {Object.entries(ORDERS).map(([order, title]) => <option value={order} key={order}>{title}</option>)}
          {given.order && !(given.order in ORDERS) && <option value={given.order}>by the column clicked</option>}
        </select>
        {live && (
          <form onSubmit={(event) => { event.preventDefault(); set({ where }); }}>
            <input type="search" aria-label="filter" value={where} onInput={(event) => setWhere(event.currentTarget.value)} title={LANGUAGE}
              placeholder='filter: reward < 0.5 and tool = shell and answer ~ "no idea" group by task  (Enter)' />
          </form>
        )}
      </div>
      {choices.value && <Usage run={name} tools={choices.value.tool} engines={choices.value.engine} />}
      {given.failed_tool && <p>Failed calls of <b>{visible(given.failed_tool)}</b>. <a href={address({ page: "trajectories", run: name })}>all trajectories</a></p>}
      {given.task && <p>Task <b>{visible(given.task)}</b> over time. <a href={address({ page: "trajectories", run: name })}>all tasks</a></p>}
      <p class="quiet" aria-live="polite">
        {page && !stale ? `${number(page.count)} ${page.by ? `values of ${page.by}` : "trajectories"}` : !error && "Loading …"}
        {progress && !progress.looked && "; the recorded files are about to be read"}
        {page?.recorded && page.recorded > page.count && `; the run has ${number(page.recorded)}, of which the report holds some`}
        {progress && progress.indexed < progress.files && `; the index is being built: these are of ${number(progress.indexed)} of ${number(progress.files)} files`}
      </p>
      {error && <p><a href={address({ page: "trajectories", run: name })}>all trajectories</a></p>}
      {[error || choices.error, choices.value?.problem].map((one) => one && <p class="problem" key={one}>{visible(one)}</p>)}
      {Object.entries(choices.value?.damaged ?? {}).map(([file, why]) => <p class="problem" key={file}>{file} cannot be read: {visible(why)}</p>)}
      {page?.groups && <Groups by={page.by!} groups={page.groups} open={(value) => set({ where: narrowed(given.where ?? "", page.by!, value) })} />}
      <RowTable rows={rows} run={name} at={at} stale={stale} order={given.order ?? "newest"} sort={(order) => set({ order })} />
      {page && page.count > PAGE && (
        <div class="bar">
          <button disabled={!offset} onClick={() => turn(-1)}>previous</button>
          <span class="quiet">{number(offset + 1)}–{number(offset + shown)}</span>
          <button disabled={offset + shown >= page.count} onClick={() => turn(1)}>next</button>
        </div>
      )}
    </main>
  );
}

// The heads of the list: a title, the orders that a click chooses in turn, and whether a narrow window leaves it out.
const HEADS: [string, string, string, boolean][] = [
  ["step", "newest", "oldest", false],
  ["group", "group_up", "group_down", false],
  ["reward", "reward_low", "reward_high", false],
  ["task", "prompt_up", "prompt_down", false],
  ["expected", "expected_up", "expected_down", false],
  ["last answer", "answer_up", "answer_down", false],
  ["tokens", "tokens_down", "tokens_up", true],
  ["masked", "masked_down", "masked_up", true],
  ["stale", "staleness_down", "staleness_up", true],
  ["end", "end_up", "end_down", true],
];
const RISING = /(_up|_low|oldest)$/;

function RowTable({ rows, run, at, stale, order, sort }: { rows: Row[]; run: string; at: number; stale: boolean; order: string; sort: (order: string) => void }) {
  if (!rows.length) return null;
  return (
    <table class={stale ? "rows stale" : "rows"} aria-busy={stale}>
      <thead>
        <tr>
          {HEADS.map(([title, first, second, optional]) => {
            const chosen = order === first || order === second;
            const rising = RISING.test(order);
            return (
              <th key={title} class={optional ? "optional" : title === "group" ? title : ""} aria-sort={!chosen ? undefined : rising ? "ascending" : "descending"}>
                <button class="plain" onClick={() => sort(order === first ? second : first)}>{title}{chosen && (rising ? " ▲" : " ▼")}</button>
              </th>
            );
          })}
        </tr>
      </thead>
      <tbody>
        {rows.map((row, index) => (
          <tr key={keyOf(row)} class={index === at ? "at" : ""} onClick={() => go({ page: "trajectory", run, key: keyOf(row) })}>
            <td class="figure">{row.step}</td>
            <td class="figure group"><a href={address({ page: "trajectory", run, key: keyOf(row) })}>{row.partition === "eval" ? visible(row.task) : row.grp}.{row.sample}{row.segment ? `.${row.segment}` : ""}{row.role && ` ${row.role}`}</a></td>
            <td><Reward value={row.reward + row.turn_reward} /></td>
            <td class="preview">{visible(row.prompt)}</td>
            <td class="preview expected">{visible(row.expected)}</td>
            <td class={row.error ? "preview problem" : "preview"}>{visible(row.answer)}</td>
            <td class="figure optional">{number(row.tokens)}</td>
            <td class="figure optional">{row.masked ? number(row.masked) : ""}</td>
            <td class="figure optional">{row.staleness ?? ""}</td>
            <td class="optional">{row.finish}{row.failed_calls ? <span class="problem"> {row.failed_calls} failed</span> : null}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

const LANGUAGE = `NAME SIGN VALUE, joined by "and"; signs: = != < <= > >=, and ~ for a part of a text
numbers: step group sample segment reward advantage tokens sampled masked weight difference staleness turns calls failed_calls seconds
texts: task source role prompt answer expected partition end; names: tool failed_tool engine rule
then perhaps: group by NAME`;

// The filter without its grouping, for the rows of one group.
function narrowed(where: string, by: string, value: RowGroup["value"]): string {
  const rest = where.replace(/group\s+by\s+\w+\s*$/, "").trim();
  const own = typeof value === "number" ? `${by} = ${value}` : `${by} = "${value ?? ""}"`;
  return rest ? `${rest} and ${own}` : own;
}

function Groups({ by, groups, open }: { by: string; groups: RowGroup[]; open: (value: RowGroup["value"]) => void }) {
  return (
    <div class="scroll">
      <table class="rows">
        <thead><tr><th>{by}</th><th>rows</th><th>reward</th><th class="optional">lowest</th><th class="optional">highest</th><th>tokens</th><th class="optional">failed calls</th><th>errors</th></tr></thead>
        <tbody>
          {groups.map((group) => {
            const text = typeof group.value === "string" ? group.value : "";
            // The language has no value for null, nor a quote inside a text.
            const linked = group.value !== null && !text.includes('"');
            const title = group.value === null ? "none" : typeof group.value === "number" ? number(group.value) : visible(text || "none");
            return (
              <tr key={`${group.value}`}>
                <td class="preview">{linked ? <button class="plain link" onClick={() => open(group.value)}>{title}</button> : title}</td>
                <td class="figure">{number(group.rows)}</td>
                <td><Reward value={group.reward} /></td>
                <td class="figure optional">{number(group.lowest)}</td>
                <td class="figure optional">{number(group.highest)}</td>
                <td class="figure">{number(group.tokens)}</td>
                <td class="figure optional">{number(group.failed_calls)}</td>
                <td class="figure">{number(group.errors)}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

export function Reward({ value }: { value: number }) {
  const kind = value > 0 ? "good" : value < 0 ? "bad" : "none";
  return <span class={`reward ${kind}`}>{number(value)}</span>;
}

function Select({ label, value, set, options }: { label: string; value: string | undefined; set: (value: string) => void; options: [string, string][] }) {
  if (!options.length) return null;
  return (
    <select aria-label={label} value={value ?? ""} onChange={(event) => set(event.currentTarget.value)}>
      <option value="">{label}: any</option>
      {options.map(([one, title]) => <option value={one} key={one}>{title}</option>)}
    </select>
  );
}

function Range({ label, name, given, set, hint }: {
  label: string;
  name: string;
  given: Record<string, string>;
  set: (changes: Record<string, string>) => void;
  hint: [number | null, number | null];
}) {
  const part = (end: "from" | "to", index: 0 | 1) => (
    <input type="number" step="any" aria-label={`${label} ${end}`} placeholder={hint[index] === null ? end : `${hint[index]}`} value={given[`${name}_${end}`] ?? ""}
      onChange={(event) => set({ [`${name}_${end}`]: event.currentTarget.value })} />
  );
  return <span class="range">{label} {part("from", 0)}–{part("to", 1)}</span>;
}
