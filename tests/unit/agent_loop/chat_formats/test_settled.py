"""What is settled of an answer is the beginning of what is read at its end, however it goes on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_async.agent_loop.chat_formats.format import Settled, without_beginnings
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.mistral import MistralFormat
from rl_async.agent_loop.chat_formats.render import ChatRenderer, TokenizerFormat
from rl_async.agent_loop.gateway.chat import read_answer
from rl_async.agent_loop.gateway.recorder import cut_at_stop
from rl_async.agent_loop.tiny_tokenizer import CHAT_TEMPLATE
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateResult
from tests.support.families import byte_tokenizer
from tests.unit.agent_loop.chat_formats.test_harmony import TEMPLATE as HARMONY
from tests.unit.agent_loop.chat_formats.test_mistral import TEMPLATE as MISTRAL

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
OBJECT = '{"name": "f", "arguments": {}}'
CHATS: dict[str, TokenizerFormat] = {
    "hermes": ChatRenderer(byte_tokenizer(CHAT_TEMPLATE, eos="<|im_end|>")),
    "thinking": ChatRenderer(byte_tokenizer("{#- </think> -#}" + CHAT_TEMPLATE, eos="<|im_end|>")),
    "gpt-oss": HarmonyFormat(byte_tokenizer(HARMONY, eos="<|return|>")),
    "mistral": MistralFormat(byte_tokenizer(MISTRAL, eos="</s>")),
}
HEADERS = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", " to=functions.f<|channel|>c<|message|>")
SAID = (
    *("a", "b", "ab", " ", "\n", "é", "☃", "<", "<th", "</", "[", "[T"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", *HEADERS, "<|end|><|start|>assistant", "<|call|>"),
    *("<tool_call>", "</tool_call>", f"<tool_call>{OBJECT}</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL_CALLS]f{}"),
)
STOPS = ("b", "ab<", "a ", "☃", "<tool")


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(CHATS)),
    said=st.lists(st.sampled_from(SAID), max_size=8),
    stops=st.lists(st.sampled_from(STOPS), max_size=2),
    tools=st.booleans(),
    opened=st.booleans(),
    torn=st.integers(0, 3),
)
def test_what_is_settled_stays(
    name: str, said: list[str], stops: list[str], tools: bool, opened: bool, torn: int
) -> None:
    chat = CHATS[name]
    offered = TOOLS if tools else []
    prompt = chat.encode("x<think>\n" if opened else "x")
    sampled = chat.encode("".join(said))
    sampled = sampled[: len(sampled) - torn]  # in the middle of a character, perhaps
    result = GenerateResult(
        token_ids=sampled,
        logprobs=[0.0] * len(sampled),
        versions=[VersionRun(Version(), 0, len(sampled))],
        finish_reason="length",
    )
    kept = cut_at_stop(result, stops, chat).token_ids if sampled else []
    end = read_answer(chat.parse(kept, prompt_ids=prompt, tools=offered, stops=stops), tools=tools)
    for size in range(len(sampled) + 1):
        found = chat.settled(sampled[:size], prompt_ids=prompt, tools=offered, stops=stops)
        assert end.text.startswith(found.content) and end.reasoning.startswith(found.reasoning), sampled[:size]


@pytest.mark.parametrize(
    ("name", "said", "tools", "expected"),
    [
        ("hermes", "so it is", [], Settled("", "so it is")),
        ("hermes", "so <tool_ca", TOOLS, Settled("", "so")),
        ("hermes", "so <tool_call>{", [], Settled("", "so <tool_call>{")),
        ("thinking", "<think>so it </thi", TOOLS, Settled("so it", "")),
        ("thinking", "<think>so</think>\n\nit is", TOOLS, Settled("so", "it is")),
        ("gpt-oss", f"{HEADERS[0]}so<|end|><|start|>assistant{HEADERS[1]}it is", TOOLS, Settled("so", "it is")),
        ("mistral", "so it[TOOL_CALLS]f[AR", TOOLS, Settled("", "so it")),
    ],
)
def test_text_is_settled_as_it_comes(name: str, said: str, tools: list[dict[str, object]], expected: Settled) -> None:
    chat = CHATS[name]
    assert chat.settled(chat.encode(said), prompt_ids=chat.encode("x"), tools=tools) == expected


def test_what_may_belong_to_what_comes_is_held_back() -> None:
    assert without_beginnings("1+2+", ["+3"]) == "1+2"
    assert without_beginnings("1+2+3", ["+3"]) == "1+2+3"
    assert without_beginnings("a\ufffd", []) == "a"
    assert without_beginnings("aab", ["aabaa", "bx"]) == ""
