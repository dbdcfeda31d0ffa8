"""Chat formats against the templates that TRL keeps of each family: rendering, reading back, and bridging.

A case is a conversation with a next turn: some messages, what the assistant says, and what follows. The template prints
it whole; from that text the tokens are taken that a model would have sampled, up to the first token that stops it. Then

- `prompt` must print what the template prints before the assistant's turn,
- `parse` must find what the assistant said,
- `prompt`, sampled tokens and `bridge` together must be the text of the whole conversation.

What is not compared is counted by its reason: the template prints the past differently once a conversation goes on
(Qwen leaves out reasoning, or puts an empty one before the last turn), where a format keeps what was sampled.
"""

import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rl_async.agent_loop.chat_formats.format import CannotBridge, ChatFormat, SampledTurn
from rl_async.agent_loop.chat_formats.format_registry import MistralFormat, choose
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import INSTALL, LibraryFormat, installed
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from tests.conftest import vllm_python
from tests.contracts.oracles.oracle import oracle_python
from tests.support.tiny_models import byte_tokenizer
from tests.unit.agent_loop.test_chat_formats import CHATML, XML

pytestmark = pytest.mark.slow


CASES = 60
TURNS = {  # begin-of-text and end-of-turn tokens, which are the tokenizer's and not the template's
    "llama": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "qwen": (None, "<|im_end|>"),
    "glm": (None, "<|endoftext|>"),
    "nemotron": (None, "<|im_end|>"),
    "lfm": (None, "<|im_end|>"),
    "gptoss": (None, "<|return|>"),
    "phi": (None, "<|end|>"),
}
FOUND = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen3.5",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_6": "qwen3.5",
    "qwen3_8": "qwen3.8",
    "llama3_1": "llama-3",
    "llama3_2": "llama-3",
    "glm4moe": "glm-4.5",
    "gemma4": "gemma4",
    "gemma4_v5": "gemma4",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "nemotron_3_5_lightning": "nemotron-3-ultra",
    "gptoss": "gpt-oss",
}
# Whose templates leave out reasoning once a user speaks again; none does between calls and their results.
DROPS = {name for name in FOUND if name.startswith("nemotron")} | {
    *("qwen3", "qwen3_5_think", "qwen3_6", "glm4moe", "gemma4_v5", "gptoss")
}
KEEPS_EMPTY = "qwen3_5_nothink"  # the package leaves the empty reasoning that opened a turn where it was
# At least so many of a family's cases are equal to the template, a few less than were counted.
EQUAL = dict.fromkeys(FOUND, 55) | {
    name: 20 for name in FOUND if name.startswith(("qwen3_5", "qwen3_6", "nemotron", "gptoss"))
}
AGREE = 55  # and so many are equal except for earlier turns
# Whose answers may end within their reasoning, after which they cannot go on.
REASONING = {"qwen3_8", "gemma4"} | DROPS - {"qwen3", "gptoss"}
MOST_REFUSED = 45
NO_TOOLS = [
    "llama3",
    "gemma",
    "gemma3",
    "phi3",
]  # templates that print none; a fine-tuned model may write Hermes' calls
# Whose calls nothing here reads as that template prints them.
NOT_KNOWN = ["gemma4_v2", "lfm2", "deepseekv3"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for a text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "The text."},
                    "limit": {"type": "integer", "description": "How many."},
                },
                "required": ["query"],
            },
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "search", "arguments": {"query": "q"}}}
    ],
}
TEXTS = ["a", "what is 2+3?", "naïve 東京\n\nend", "x <b>y</b> & 'z'", '{"not": "a call"}', "  spaces  ", "1\n2\n"]


@pytest.fixture(scope="module")
def templates() -> Path:
    if not installed():
        pytest.skip(f"the package renderers is not here; install it with {INSTALL}")
    found = list(Path(oracle_python()).parents[1].glob("lib/python*/site-packages/trl/chat_templates"))
    assert found, "TRL is installed without its templates"
    return found[0]


def make(templates: Path, name: str, chat_format: str = "auto") -> ChatFormat:
    bos, eos = next((turns for family, turns in TURNS.items() if name.startswith(family)), (None, "<|endoftext|>"))
    tokenizer = byte_tokenizer((templates / f"{name}.jinja").read_text(), bos=bos, eos=eos)
    return choose(tokenizer, chat_format)  # type: ignore[arg-type]


Formats = ChatRenderer | LibraryFormat | HarmonyFormat
# The templates that mistral-common generates, which vLLM's environment has: {version, SentencePiece or Tekken}.
MISTRAL = {"v3_spm": 35, "v3": 35, "v7_spm": 35, "v7": 35, "v11": 35, "v13": 55}  # how many are equal at least
GENERATE = """
import sys
from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
for name in sys.argv[2:]:
    version, _, spm = name.partition("_")
    config = TemplateConfig(version=TokenizerVersion(version), spm=bool(spm), use_special_token_variables=True)
    open(f"{sys.argv[1]}/{name}.jinja", "w").write(build_chat_template(config))
"""
Case = tuple[list[dict[str, Any]], list[Any], dict[str, Any], list[dict[str, Any]]]


def cases(seed: str) -> Iterator[Case]:
    """Yield (messages, tools, what the assistant says, what follows)."""
    draw = random.Random(seed)

    def text() -> str:
        return draw.choice(TEXTS)

    def call() -> dict[str, Any]:
        arguments: dict[str, Any] = {"query": text().strip()}
        if draw.random() < 0.5:
            arguments["limit"] = draw.randint(-3, 300)
        function = {"name": "search", "arguments": arguments}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00001", "type": "function"} | {"function": function}],
        }

    def result() -> dict[str, Any]:
        return {"role": "tool", "content": text(), "name": "search", "tool_call_id": "call00001"}

    for _ in range(CASES):
        messages = [{"role": "system", "content": text()}] if draw.random() < 0.4 else []
        messages.append({"role": "user", "content": text()})
        tools = TOOLS if draw.random() < 0.7 else []
        for _ in range(draw.randint(0, 2) if tools else 0):
            messages += [call(), result()]
        if tools and draw.random() < 0.6:
            yield messages, tools, call(), [result()]
        else:
            yield (
                messages,
                tools,
                {"role": "assistant", "content": text().strip()},
                [{"role": "user", "content": text()}],
            )


def compare(chat: Formats, case: Case) -> str:
    """Return "agrees" or what was not compared. Raises AssertionError for a difference."""
    messages, tools, said, then = case
    before = chat._render(messages, tools, generate=True)
    if before.endswith("<think>\n"):
        said = said | {"reasoning_content": "I think\nso"}
    whole = chat._render([*messages, said, *then], tools, generate=True)
    prompt = chat.prompt([flat(message) for message in messages], tools)
    assert chat.decode(prompt) == before
    kept = whole.startswith(before)
    if not kept:
        whole = chat._render([*messages, said], tools, generate=False)
    assert whole.startswith(before)
    rest = chat.encode(whole[len(before) :])
    end = next((i for i, token in enumerate(rest) if token in chat.stop_token_ids), None)
    if end is None:  # gpt-oss's, which ends otherwise once it is past
        kept, rest = False, chat.encode(chat._render([*messages, said], tools, generate=False)[len(before) :])
        end = next(i for i, token in enumerate(rest) if token in chat.stop_token_ids)
    sampled, after = rest[: end + 1], rest[end + 1 :]
    found = chat.parse(SampledTurn(sampled, prompt, tools))
    wanted = [call["function"] for call in said.get("tool_calls", [])]
    assert [{"name": call.name, "arguments": call.arguments} for call in found.calls] == wanted
    assert (found.content.strip(), found.reasoning) == (said["content"].strip(), said.get("reasoning_content", ""))
    added = chat.decode(chat.bridge(prompt, sampled, then, tools))
    if not kept:
        assert all(message["content"].strip() in added for message in then)
        return "agrees, but the template prints the past differently"
    assert added == chat.decode(after)
    return "agrees"


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a gateway has it: calls with a name and JSON text."""
    calls = [
        {
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            "id": call["id"],
        }
        for call in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("name", FOUND)
def test_a_format_prints_reads_and_continues_as_the_template(templates: Path, name: str) -> None:
    chat = make(templates, name)
    assert isinstance(chat, Formats) and chat.name == FOUND[name]
    counts = Counter(compare(chat, case) for case in cases(name))
    print(f"{name}: {chat.name}: {dict(counts)}")
    assert counts["agrees"] >= EQUAL[name]
    assert sum(count for kind, count in counts.items() if kind.startswith("agrees")) >= AGREE


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run([vllm_python(), "-c", GENERATE, folder, *MISTRAL], env=environment, check=True, timeout=120)
    return folder


@pytest.mark.parametrize("name", MISTRAL)
def test_mistrals_format_prints_reads_and_continues_as_its_templates(mistral: Path, name: str) -> None:
    chat = choose(byte_tokenizer((mistral / f"{name}.jinja").read_text(), bos="<s>", eos="</s>"))
    assert isinstance(chat, MistralFormat)
    counts = Counter(compare(chat, case) for case in cases(name))
    print(f"mistral {name}: {dict(counts)}")
    assert counts["agrees"] >= MISTRAL[name]
    assert sum(count for kind, count in counts.items() if kind.startswith("agrees")) >= AGREE


@pytest.mark.parametrize("name", FOUND)
def test_a_cut_turn_is_ended_and_the_conversation_goes_on(templates: Path, name: str) -> None:
    """Whatever was sampled, `bridge` appends to it, or refuses if the turn ended within its reasoning."""
    chat = make(templates, name)
    assert isinstance(chat, Formats)
    draw, refused = random.Random(name), 0
    user = [{"role": "user", "content": "x"}]
    opening = chat._render(user, (), generate=True).removeprefix(chat._render(user, (), generate=False))
    assert opening
    for messages, tools, _, then in cases(name):
        prompt = chat.prompt([flat(message) for message in messages], tools)
        sampled = [draw.randrange(256) for _ in range(draw.randint(0, 8))]
        sampled += [draw.choice(chat.stop_token_ids)] * (draw.random() < 0.5)
        try:
            added = chat.bridge(prompt, sampled, then, tools)
        except CannotBridge:
            refused += 1
            continue
        text = chat.decode(added)
        goes_on = name.startswith("gemma4") and then[-1]["role"] == "tool"  # in the turn that made the call
        assert goes_on or text.endswith(opening), "the next turn is open"
        assert all(written(name, message) in text for message in then)
    assert refused <= (MOST_REFUSED if name in REASONING else 0)


def written(name: str, message: dict[str, Any]) -> str:
    """What a template prints of the content of a message; Llama's and gpt-oss's print results as JSON."""
    if message["role"] == "tool" and name.startswith(("llama", "gptoss")):
        return json.dumps(message["content"], ensure_ascii=False)
    return str(message["content"]).strip()


def stripped(chat: Formats, case: Case) -> tuple[str, str, str]:
    """Return whether the row goes on with ``agent.past_reasoning=strip``, what is sent then, and what the template
    prints of the same messages."""
    messages, tools, said, then = case
    before = chat._render(messages, tools, generate=True)
    thought = said | dict.fromkeys(("reasoning_content", "thinking"), "I think\nso")
    printed = chat._render([*messages, thought], tools, generate=False)
    if not (printed.startswith(before) and "I think" in printed):
        thought, printed = said, chat._render([*messages, said], tools, generate=False)
    rest = chat.encode(printed[len(before) :])
    rest += chat.encode("<|user|>" if then[0]["role"] == "user" else "<|observation|>")  # which end GLM's turns
    sampled = rest[: next(i + 1 for i, token in enumerate(rest) if token in chat.stop_token_ids)]
    turn: dict[str, Any] = {"role": "assistant", "content": chat.turn_text(sampled)}
    given = [flat(message) for message in messages]
    place, whole = len(given), [*given, turn, *then]
    kept = chat.keeps_past(whole, place, tools, sampled=[place])
    sent = chat.prompt(whole, tools, sampled=[place])
    if kept:
        prompt = chat.prompt(given, tools)
        sent = [*prompt, *sampled, *chat.bridge(prompt, sampled, then, tools)]
    reasoned = " of reasoning" if "reasoning_content" in thought else ""
    kind = f"{'kept' if kept else 'new row'} after a turn{reasoned}, before {then[0]['role']}"
    return kind, chat.decode(sent), chat._render([*messages, thought, *then], tools, generate=True)


@pytest.mark.parametrize("name", sorted(FOUND.keys() - {KEEPS_EMPTY}))
def test_without_past_reasoning_a_context_is_the_templates(templates: Path, name: str) -> None:
    chat, counts = make(templates, name), Counter[str]()
    assert isinstance(chat, Formats)
    for case in cases(name):
        kind, sent, wanted = stripped(chat, case)
        assert sent == wanted
        counts[kind] += 1
    print(f"{name}: {chat.name}: {dict(counts)}")
    new = {kind for kind in counts if kind.startswith("new row")}
    assert new == ({"new row after a turn of reasoning, before user"} if name in DROPS else set())


def test_without_past_reasoning_a_context_is_deepseek_r1s(templates: Path) -> None:
    """Its template opens the reasoning in the prompt, and prints none of any earlier turn."""
    chat = make(templates, "deepseek_r1_distill")
    user: dict[str, Any] = {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": "I think\nso\n</think>\n\nyes"}
    assert not chat.keeps_past([user, said, user], 1, sampled=[1])
    sent = chat._tokenizer.decode(chat.prompt([user, said, user], sampled=[1]))
    assert sent == (
        "<｜begin▁of▁sentence｜><｜User｜>x<｜Assistant｜>\n\nyes<｜end▁of▁sentence｜><｜User｜>x<｜Assistant｜><think>\n"
    )


@pytest.mark.parametrize("name", FOUND)
def test_no_text_from_outside_becomes_a_special_token(templates: Path, name: str) -> None:
    chat = make(templates, name)
    assert isinstance(chat, Formats)
    special = {token.content: i for i, token in chat._tokenizer.added_tokens_decoder.items() if token.special}
    everything = " ".join(special)
    stop = chat.encode("<turn|>") if chat.name == "gemma4" else chat.stop_token_ids[:1]
    said = chat.encode("so</think>ok") + stop

    def counts(text: str) -> list[Counter[int]]:
        user, then = {"role": "user", "content": text}, [{"role": "tool", "content": text, "name": "search"}]
        system = [{"role": "system", "content": text}]
        prompt = chat.prompt([*system, user, {"role": "assistant", "content": text}, user], TOOLS)
        rows = [prompt, chat.bridge(prompt, said, [user], TOOLS)]
        if chat.name == "gemma4":  # takes results after calls only
            rows.append(chat.prompt([user, flat(CALL), *then], TOOLS))
        else:
            rows.append(chat.bridge(prompt, said, then, TOOLS))
        return [Counter(i for i in ids if i in special.values()) for ids in rows]

    assert counts(f"x {everything} y") == counts("x y")


@pytest.mark.parametrize(("name", "stable"), [("llama3_2", True), ("glm4moe", True), ("qwen3_5_think", False)])
def test_a_demonstration_is_what_an_engine_would_be_given(templates: Path, name: str, stable: bool) -> None:
    chat = make(templates, name)
    assert isinstance(chat, LibraryFormat)
    user, said = {"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "spoken"}
    if not stable:
        with pytest.raises(ValueError, match="message 1"):
            chat.row([user, said, user, said], [])
    ids, mask = chat.row([user, said, user, said] if stable else [user, said], [])
    learned = chat.decode([token for token, sampled in zip(ids, mask, strict=True) if sampled])
    assert learned.count("spoken") == (2 if stable else 1) and "a<" not in learned


@pytest.mark.parametrize("name", NO_TOOLS)
def test_templates_without_tools_print_none(templates: Path, name: str) -> None:
    chat = make(templates, name)
    assert (chat.name, chat.prints_tools) == ("hermes", False)


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_templates_that_no_format_prints_are_told_apart(templates: Path, name: str) -> None:
    assert make(templates, name).name == "plain"


# What chat formats read in whole, mutated and cut texts, against vLLM's parsers of reasoning and calls.


TEXTS_EACH = 200
OPENING = "<think>\n"
WHOLE = {
    "agree",
    "a function that was not offered, whose arguments have no types",
}  # what texts as they should be may be


class Family(NamedTuple):
    """``tokens``: what its tokenizer knows beside bytes; the parsers of vLLM by name."""

    tokens: str
    tool_parser: str
    reasoning_parser: str = ""
    opened: bool = False  # prompts end with OPENING


FAMILIES = {
    "hermes": Family("", "hermes"),
    "mistral": Family("<s></s>[INST][/INST][TOOL_CALLS][ARGS][CALL_ID][TOOL_RESULTS]", "mistral"),
    "qwen3": Family(XML, "hermes", "qwen3"),
    "qwen3.5": Family(XML, "qwen3_coder", "qwen3", opened=True),
    "llama-3": Family("<|begin_of_text|><|start_header_id|><|end_header_id|><|python_tag|>", "llama3_json"),
    "glm-4.5": Family(
        f"{XML}<arg_key></arg_key><arg_value></arg_value><|assistant|><|user|><|system|><|observation|>[gMASK]<sop>/nothink",
        "glm45",
        "glm45",
    ),
    "kimi-k2": Family(
        "<|im_user|><|im_assistant|><|im_system|><|im_middle|><|tool_calls_section_begin|><|tool_calls_section_end|>"
        "<|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|>[BOS][EOS]",
        "kimi_k2",
    ),
    "minimax-m2": Family(
        "]~!b[ ]~b] [e~[ <minimax:tool_call></minimax:tool_call><think></think><fim_prefix>",
        "minimax_m2",
        "minimax_m2",
        opened=True,
    ),
    "deepseek-v3": Family(
        "<｜begin▁of▁sentence｜><｜end▁of▁sentence｜><｜User｜><｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"
        "<｜tool▁call▁begin｜><｜tool▁call▁end｜><｜tool▁sep｜><｜tool▁outputs▁begin｜><｜tool▁outputs▁end｜>"
        "<｜tool▁output▁begin｜><｜tool▁output▁end｜>",
        "deepseek_v3",
    ),
}


# At least so many of a family's texts are read alike, a few less than docs/reference/chat_formats.md counts.
PARSER_AGREE = {
    "hermes": 165,
    "mistral": 175,
    "qwen3": 160,
    "qwen3.5": 138,
    "llama-3": 185,
    "glm-4.5": 95,
    "kimi-k2": 160,
    "minimax-m2": 125,
    "deepseek-v3": 185,
}


def parser_make(name: str) -> ChatRenderer | LibraryFormat:
    chat = choose(byte_tokenizer(CHATML.replace("TOKENS", FAMILIES[name].tokens)), name)  # type: ignore[arg-type]
    assert isinstance(chat, ChatRenderer | LibraryFormat)
    return chat


def spoken(name: str, chat: ChatRenderer | LibraryFormat, draw: random.Random) -> str:
    """Return what a model of the family says: text, one or two calls, and perhaps reasoning."""
    calls = []
    for number in range(draw.choice([0, 1, 1, 1] if name == "llama-3" else [0, 1, 1, 2])):
        arguments: dict[str, Any] = {"query": draw.choice(TEXTS).strip()}
        if draw.random() < 0.5:
            arguments["limit"] = draw.randint(-3, 300)
        function = {"name": "search" if draw.random() < 0.9 else "find_it", "arguments": arguments}
        calls.append({"id": f"functions.{function['name']}:{number}", "type": "function", "function": function})
    content = "" if calls and (name == "llama-3" or draw.random() < 0.5) else draw.choice(TEXTS).strip()
    if isinstance(chat, ChatRenderer):
        texts = [chat._syntax.render(c["function"]["name"], json.dumps(c["function"]["arguments"])) for c in calls]
        return "\n".join([*filter(None, [content]), *texts])
    said = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    if FAMILIES[name].reasoning_parser and draw.random() < 0.5:
        said["reasoning_content"] = draw.choice(["so", "I think\nso", "2 < 3 & 4"])
    row = chat._renderer.render([{"role": "user", "content": "x"}, said], tools=TOOLS)
    return chat.turn_text([i for i, sampled in zip(row.token_ids, row.sampled_mask, strict=True) if sampled])


def changed(text: str, draw: random.Random) -> str:
    """Return the text as it is, cut, or with a piece of it dropped, doubled, put elsewhere or replaced."""
    kind = draw.choice(["whole", "whole", "cut", "drop", "double", "move", "replace"])
    if kind == "whole" or not text:
        return text
    start = draw.randrange(len(text))
    end = min(len(text), start + draw.choice([1, 1, 2, 5, 12]))
    piece = text[start:end]
    if kind == "cut":
        return text[:start]
    rest = text[:start] + text[end:]
    if kind == "drop":
        return rest
    if kind == "double":
        return text[:end] + piece + text[end:]
    place = draw.randrange(len(rest) + 1)
    return (
        rest[:place] + piece + rest[place:] if kind == "move" else text[:start] + draw.choice('x"{}<>,:') + text[end:]
    )


def texts_of(name: str) -> list[tuple[str, bool]]:
    """Return texts, and whether each is as a model would write it. Where prompts open the reasoning, it is open."""
    chat, draw = parser_make(name), random.Random(name)
    texts = []
    for _ in range(TEXTS_EACH):
        text = spoken(name, chat, draw)
        if FAMILIES[name].opened:
            text = text.removeprefix(OPENING)
        other = text if "find_it" in text else changed(text, draw)
        texts.append((other, other == text))
    return texts


class Reading(NamedTuple):
    """What was found in a text; calls are names with arguments, of which those in ``broken`` could not be read."""

    reasoning: str
    content: str
    calls: list[list[Any]]
    broken: int


def ours(chat: ChatRenderer | LibraryFormat | HarmonyFormat, text: str, opened: bool) -> Reading:
    found = chat.parse(SampledTurn(chat.encode(text), chat.encode(OPENING) if opened else (), TOOLS))
    calls = [[call.name, call.arguments] for call in found.calls if not call.problem]
    return Reading(found.reasoning.strip(), found.content.strip(), calls, len(found.calls) - len(calls))


def theirs(answer: dict[str, Any]) -> Reading:
    calls, broken = [], 0
    for name, arguments in answer["calls"]:
        try:
            calls.append([name, json.loads(arguments)])
        except json.JSONDecodeError:  # which vLLM's server hands on
            broken += 1
    return Reading(answer["reasoning"].strip(), answer["content"].strip(), calls, broken)


def within(few: list[Any], many: list[Any]) -> bool:
    """Whether ``few`` is a part of ``many``, in its order."""
    rest = iter(many)
    return all(one in rest for one in few)


def verdict(ours: Reading, theirs: Reading, text: str) -> str:
    """Say how two readings compare: "agree", the reason why they do not, or "unexplained"."""
    unclear = ours.broken or theirs.broken  # then what is not a call may be text or nothing
    if (ours.reasoning, ours.calls) == (theirs.reasoning, theirs.calls) and (unclear or ours.content == theirs.content):
        return "agree"
    offered = [[call for call in reading.calls if call[0] == "search"] for reading in (ours, theirs)]
    if ours.broken and not theirs.calls:
        return "vLLM makes text of all calls if one is broken"
    if ours.broken and within(ours.calls, theirs.calls):
        return "vLLM completes a broken call"
    if ours.calls != theirs.calls and offered[0] == offered[1]:
        return "a function that was not offered, whose arguments have no types"
    if not theirs.calls and any(arguments == {} for _, arguments in ours.calls):
        return "a call without arguments is one here"
    if ours.calls == theirs.calls and not text.lstrip().startswith("<think>") and theirs.reasoning:
        return "vLLM takes what is not opened as reasoning for it"
    if within(ours.calls, theirs.calls) and len(ours.calls) < len(theirs.calls):
        return "vLLM reads a call whose tags are misspelt"
    if within(theirs.calls, ours.calls) and len(ours.calls) > len(theirs.calls):
        return "vLLM does not read a call of which a part is misspelt"
    if max(sum(call not in b for call in a) for a, b in ((ours.calls, theirs.calls), (theirs.calls, ours.calls))) == 1:
        return "one call with a misspelt part is read in another way"
    if ours.calls == theirs.calls and ours.content.startswith(theirs.content):
        return "vLLM drops what follows a call"
    if {len(ours.calls), len(theirs.calls)} == {1, 2}:
        return "two calls with a misspelt tag between them are read as one"
    return "unexplained"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    if not installed():
        pytest.skip(f"the package renderers is not here; install it with {INSTALL}")
    folder = tmp_path_factory.mktemp("parsers")
    questions = []
    for name, family in FAMILIES.items():
        parser_make(name)._tokenizer.save_pretrained(folder / name)
        texts = [text for text, _ in texts_of(name)]
        questions.append(family._asdict() | {"tokenizer": str(folder / name), "tools": TOOLS, "texts": texts})
    (folder / "questions").write_text(json.dumps(questions))
    script = Path(__file__).with_name("vllm_parsers.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [vllm_python(), str(script), str(folder / "questions"), str(folder / "answers")],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(FAMILIES, json.loads((folder / "answers").read_text()), strict=True))


def harmony(draw: random.Random) -> str:
    """Return what gpt-oss says after the opening of its turn: reasoning and perhaps a preamble, then a call or text."""
    reasoning = draw.choice(["", "so", "I think\nso", "2 < 3 & 4"])
    parts = [f"<|channel|>analysis<|message|>{reasoning}"] if reasoning else []
    if draw.random() < 0.4:
        return "<|end|><|start|>assistant".join([*parts, f"<|channel|>final<|message|>{draw.choice(TEXTS)}<|return|>"])
    if draw.random() < 0.3:
        parts.append(f"<|channel|>commentary<|message|>{draw.choice(TEXTS)}")
    name = "search" if draw.random() < 0.9 else "find_it"
    arguments = {"query": draw.choice(TEXTS)} | ({"limit": draw.randint(-3, 300)} if draw.random() < 0.5 else {})
    heads = (" to=functions.{}<|channel|>commentary json", "<|channel|>commentary to=functions.{} <|constrain|>json")
    parts.append(f"{draw.choice(heads).format(name)}<|message|>{json.dumps(arguments)}<|call|>")
    return "<|end|><|start|>assistant".join(parts)


def harmony_verdict(ours: Reading, theirs: Reading) -> str:
    """Say how two readings of gpt-oss compare: "agree", the reason why they do not, or "unexplained"."""
    if ours == theirs:
        return "agree"
    same = (ours.reasoning, ours.calls) == (theirs.reasoning, theirs.calls)
    if same and ours.broken > theirs.broken:
        return "a call that is cut off in its header is one here"
    if ours.reasoning == theirs.reasoning and not theirs.calls and len(ours.calls) == 1:
        return "a call whose recipient or start is misspelt is one here"
    if same and theirs.content in ours.content:
        return "text in a channel that is misspelt is text here"
    return "unexplained"


def test_gpt_oss_is_read_as_the_package_reads_it() -> None:
    """vLLM's parser and OpenAI's own need a vocabulary that they download; the package's takes any tokenizer."""
    if not installed():
        pytest.skip(f"the package renderers is not here; install it with {INSTALL}")
    from renderers.parsing import parse_gpt_oss

    tokens = ("start", "channel", "message", "end", "call", "return", "constrain")
    tokenizer = byte_tokenizer(CHATML.replace("TOKENS", "".join(f"<|{token}|>" for token in tokens)))
    chat, draw, counts, open_questions = HarmonyFormat(tokenizer), random.Random("gpt-oss"), Counter[str](), []
    ids = {f"{token}_id": chat.encode(f"<|{token}|>")[0] for token in tokens}
    for _ in range(TEXTS_EACH):
        whole = harmony(draw)
        text = changed(whole, draw)
        found = parse_gpt_oss(tokenizer, chat.encode("<|start|>assistant" + text), **ids)
        good = [[call.name, call.arguments] for call in found.tool_calls if str(call.status) == "ok"]
        broken = len(found.tool_calls) - len(good)
        other = Reading((found.reasoning_content or "").strip(), found.content.strip(), good, broken)
        mine = ours(chat, text, opened=False)
        verdict = harmony_verdict(mine, other)
        counts[verdict] += 1
        if verdict == "unexplained" or (text == whole and verdict != "agree"):
            open_questions.append((text, mine, other))
    print(f"gpt-oss: {dict(counts)}")
    assert not open_questions
    assert counts["agree"] >= 120


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_format_reads_what_vllm_reads(answers: dict[str, list[dict[str, Any]]], name: str) -> None:
    chat, counts, open_questions = parser_make(name), Counter[str](), []
    for (text, whole), answer in zip(texts_of(name), answers[name], strict=True):
        if "error" in answer:
            counts["vLLM raises"] += 1
            continue
        mine, other = ours(chat, text, FAMILIES[name].opened), theirs(answer)
        found = verdict(mine, other, text)
        counts[found] += 1
        if found == "unexplained" or (whole and found not in WHOLE):
            open_questions.append((text, mine, other))
    print(f"{name}: {dict(counts)}")
    assert not open_questions
    assert counts["agree"] >= PARSER_AGREE[name]
