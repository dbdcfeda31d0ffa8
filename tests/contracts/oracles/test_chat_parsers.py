"""What chat formats read in whole, mutated and cut texts, against vLLM's parsers of reasoning and calls."""

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rl_async.agent_loop.chat_formats.format import SampledTurn
from rl_async.agent_loop.chat_formats.format_registry import choose
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import INSTALL, LibraryFormat, installed
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from tests.conftest import vllm_python
from tests.contracts.oracles.test_chat_templates import TEXTS, TOOLS
from tests.support.tiny_models import byte_tokenizer

pytestmark = pytest.mark.slow

TEXTS_EACH = 200
OPENING = "<think>\n"
WHOLE = {
    "agree",
    "a function that was not offered, whose arguments have no types",
}  # what texts as they should be may be
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{# TOKENS #}"
XML = "<think></think><tool_call></tool_call><tool_response></tool_response>"


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
AGREE = {
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


def make(name: str) -> ChatRenderer | LibraryFormat:
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
    chat, draw = make(name), random.Random(name)
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
        make(name)._tokenizer.save_pretrained(folder / name)
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
    chat, counts, open_questions = make(name), Counter[str](), []
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
    assert counts["agree"] >= AGREE[name]
