// A conversation with the policy of a run: its current weights, or its newest checkpoint.

import { useEffect, useRef, useState } from "preact/hooks";
import { run as runPath } from "./api";
import { number, toolArguments, visible } from "./format";
import { PlainText } from "./tokens";

// One part of an answer; launcher/runs/chat.py says what its fields are.
interface Part {
  text?: string;
  tokens?: [string, number][];
  alternatives?: [string, number][][];
  version?: string;
  finish?: string;
  call?: string;
  arguments?: string;
  result?: string;
  error?: string;
  conversation?: string;
  about?: string;
  tools?: string[];
}

interface Exchange {
  asked: string;
  parts: Part[];
}

// Sends the words, and hands over each part as it arrives.
async function ask(run: string, conversation: string, text: string, stop: AbortSignal, tell: (part: Part) => void): Promise<void> {
  const answer = await fetch(`/api/${runPath(run)}/chat`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ conversation, text }),
    signal: stop,
  });
  if (!answer.ok || !answer.body) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.error?.message ?? `the server answered ${answer.status}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const lines = (rest + read.value).split("\n");
    rest = lines.pop()!;
    for (const line of lines) tell(JSON.parse(line) as Part);
  }
}

export function ChatPage({ name }: { name: string }) {
  const [said, setSaid] = useState<Exchange[]>([]);
  const [text, setText] = useState("");
  const [busy, setBusy] = useState<AbortController | null>(null);
  const [colour, setColour] = useState(false);
  const about = useRef<Part>({});
  const end = useRef<HTMLDivElement>(null);
  const begin = () => {
    busy?.abort();
    about.current = {};
    setSaid([]);
  };
  useEffect(begin, [name]);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [said]);
  const send = async () => {
    const asked = text.trim();
    if (!asked || busy) return;
    const stop = new AbortController();
    const tell = (part: Part) => {
      if (stop.signal.aborted) return;
      if (part.conversation) about.current = part;
      setSaid((before) => [...before.slice(0, -1), { asked, parts: [...before.at(-1)!.parts, part] }]);
    };
    setText("");
    setBusy(stop);
    setSaid((before) => [...before, { asked, parts: [] }]);
    await ask(name, about.current.conversation ?? "", asked, stop.signal, tell).catch((error: Error) => tell({ error: error.message }));
    setBusy(null);
  };
  const { about: who, tools } = about.current;
  return (
    <main class="page chat">
      <p class="quiet">
        {who ? <>Talking to {visible(who)}; tools: {tools?.join(", ") || "none"}.</> : "What the policy of this run answers now: its current weights while it runs, else its newest checkpoint, with its tools. Nothing of it is trained on or recorded."}
      </p>
      {said.map((exchange, index) => (
        <section key={index}>
          <article class="turn user"><header><b>user</b></header><PlainText text={exchange.asked} /></article>
          <Answer parts={exchange.parts} colour={colour} waiting={!!busy && index === said.length - 1} />
        </section>
      ))}
      <form class="say" onSubmit={(event) => { event.preventDefault(); void send(); }}>
        <textarea aria-label="say" rows={3} value={text} placeholder="say something  (Enter sends, Shift+Enter breaks the line)" onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); void send(); } }} />
        <div class="bar">
          {busy ? <button type="button" onClick={() => busy.abort()}>stop</button> : <button type="submit" disabled={!text.trim()}>send</button>}
          <button type="button" disabled={!said.length} onClick={begin}>new conversation</button>
          <label><input type="checkbox" checked={colour} onChange={() => setColour(!colour)} /> token probabilities</label>
        </div>
      </form>
      <div ref={end} />
    </main>
  );
}

// The parts of an answer by turn: text while it is sampled, its tokens once it is whole.
function Answer({ parts, colour, waiting }: { parts: Part[]; colour: boolean; waiting: boolean }) {
  let text = "";
  const drawn = parts.map((part, index) => {
    if (part.text) text += part.text;
    if (part.error) return <p class="problem" key={index}>{visible(part.error)}</p>;
    if (part.call) return <div class="call" key={index}><div class="text"><b>{visible(part.call)}</b>({visible(toolArguments(part.arguments ?? ""))})</div><PlainText text={part.result ?? ""} /></div>;
    if (!part.finish) return null;
    const whole = text;
    text = "";
    const notes = [part.finish !== "stop" && `ended by ${part.finish}`, part.version && `weights ${part.version}`].filter(Boolean).join(", ");
    return (
      <article class="turn assistant" key={index}>
        <header><b>assistant</b>{notes && <span class="quiet">{notes}</span>}</header>
        {colour && part.tokens ? <div class="text">{part.tokens.map(([token, logprob], at) => <Likely key={at} text={token} chance={Math.exp(logprob)} others={part.alternatives?.[at] ?? []} />)}</div> : <PlainText text={whole} />}
      </article>
    );
  });
  return (
    <>
      {drawn}
      {waiting && <article class="turn assistant" aria-busy="true"><header><b>assistant</b></header><PlainText text={text || "…"} /></article>}
    </>
  );
}

// A token, the darker the less likely it was; pointing at it shows the likeliest tokens in its place.
function Likely({ text, chance, others }: { text: string; chance: number; others: [string, number][] }) {
  const lines = others.map(([other, logprob]) => `${number(Math.exp(logprob))}  ${JSON.stringify(visible(other))}`);
  return <span class="likely" title={[`probability ${number(chance)}`, ...(lines.length ? ["the likeliest here:"] : []), ...lines].join("\n")} style={{ background: `color-mix(in srgb, var(--bad) ${Math.round(60 * (1 - chance))}%, transparent)` }}>{visible(text)}</span>;
}
