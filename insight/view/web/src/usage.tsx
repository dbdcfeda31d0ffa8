// What tools and engines did: which failed, and which were slow.

import { useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { number, seconds, visible } from "./format";
import { address } from "./place";
import type { EngineUse, ToolUse } from "./types";

export function Usage({ run, tools, engines }: { run: string; tools: ToolUse[]; engines: EngineUse[] }) {
  const [open, setOpen] = useState(false);
  if (!tools.length && !engines.length) return null;
  const failed = tools.reduce((sum, tool) => sum + tool.failed, 0);
  const title = [tools.length && `${counted(tools.length, "tool")}, ${counted(failed, "failed call")}`, engines.length && counted(engines.length, "engine")];
  return (
    <details class="usage" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{title.filter(Boolean).join("; ")}</summary>
      {open && tools.length > 0 && <Tools run={run} tools={tools} />}
      {open && engines.length > 0 && <Engines run={run} engines={engines} />}
    </details>
  );
}

const counted = (count: number, what: string) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

function Tools({ run, tools }: { run: string; tools: ToolUse[] }) {
  const found = (filter: string, tool: string, text: ComponentChildren) =>
    <a href={address({ page: "trajectories", run, given: tool ? { [filter]: tool } : { unparsed: "1" } })}>{text}</a>;
  return (
    <div class="scroll">
      <table>
        <thead><tr><th>tool</th><th>calls</th><th>failed</th><th>share</th><th>mean time</th><th>slowest</th><th>most frequent errors</th></tr></thead>
        <tbody>
          {tools.map((tool) => (
            <tr key={tool.value}>
              <td title={tool.value ? "" : "calls that could not be parsed name no tool"}>{found("tool", tool.value, visible(tool.value || "(not parsed)"))}</td>
              <td class="figure">{number(tool.calls)}</td>
              <td class="figure">{tool.failed ? found("failed_tool", tool.value, number(tool.failed)) : 0}</td>
              <td class={tool.failed ? "figure bad" : "figure quiet"}>{number((100 * tool.failed) / tool.calls)} %</td>
              <td class="figure">{seconds(tool.seconds / tool.calls)}</td>
              <td class="figure">{seconds(tool.slowest)}</td>
              <td>{tool.errors.map((one) => <div class="preview" key={one.value}>{number(one.calls)} × {visible(one.value)}</div>)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Engines({ run, engines }: { run: string; engines: EngineUse[] }) {
  return (
    <div class="scroll">
      <table>
        <thead><tr><th title="behind a dot: how often it had been restarted">engine</th><th>turns</th><th>tokens</th><th title="within one conversation">tokens/s of a turn</th><th>mean turn</th><th>slowest turn</th></tr></thead>
        <tbody>
          {engines.map((engine) => (
            <tr key={engine.value}>
              <td><a href={address({ page: "trajectories", run, given: { engine: engine.value, order: "seconds" } })}>{visible(engine.value)}</a></td>
              <td class="figure">{number(engine.turns)}</td>
              <td class="figure">{number(engine.tokens)}</td>
              <td class="figure">{number(engine.speed)}</td>
              <td class="figure">{seconds(engine.seconds / engine.turns)}</td>
              <td class="figure">{seconds(engine.slowest)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
