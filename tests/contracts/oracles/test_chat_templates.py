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
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.format import CannotBridge, ChatFormat, SampledTurn
from rl_async.agent_loop.chat_formats.format_registry import choose
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import INSTALL, LibraryFormat, installed
from rl_async.agent_loop.chat_formats.mistral import MistralFormat
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from tests.conftest import vllm_python
from tests.contracts.oracles.oracle import oracle_python
from tests.support.tiny_models import byte_tokenizer

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
