"""What holds for every chat format: past calls, settled text, and the opening of calls; and Hermes's syntax."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_async.agent_loop.chat_formats.format import (
    CALL_END,
    CALL_START,
    SampledTurn,
    Settled,
    parse_hermes,
    said_text,
    text_size,
    with_names,
    without_beginnings,
)
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.mistral import MistralFormat
from rl_async.agent_loop.chat_formats.render import ChatRenderer, TokenizerFormat
from rl_async.agent_loop.gateway.chat import read_answer
from rl_async.agent_loop.gateway.gateway_episode import cut_at_stop
from rl_async.agent_loop.tiny_tokenizer import CHAT_TEMPLATE
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateResult
from tests.support.tiny_models import byte_tokenizer
from tests.unit.agent_loop.chat_formats.test_harmony import TEMPLATE as HARMONY
from tests.unit.agent_loop.chat_formats.test_mistral import TEMPLATE as MISTRAL


def test_a_call_nested_too_deeply_is_malformed() -> None:
    deep = '{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    (call,) = parse_hermes(f"{CALL_START}{deep}{CALL_END}")
    assert call.arguments is None and call.raw == deep


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "f", "arguments": {}}', None),
        ('{"name": "f", "arguments": {}', "bad_json"),
        ('{"arguments": {}}', "no_name"),
        ('{"name": 1}', "no_name"),
        ('{"name": "f", "arguments": [1]}', "bad_arguments"),
        ('["f"]', "bad_structure"),
        ("7 times 6", "bad_json"),  # a number is no call, and what follows it no JSON
        ('{"name": 1} {"name"', "bad_json"),
        ('{"name": 1, "arguments": ' + "[" * 100_000, "bad_json"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body: str, problem: str | None) -> None:
    assert [call.problem for call in parse_hermes(f"{CALL_START}{body}{CALL_END}{CALL_START}{body}")] == [
        problem,
        "unclosed",
    ]


OPEN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls %}"
CLOSE = (
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAME = "{{ '<call>' + c.function.name }}"
TEMPLATES = {
    "mappings": OPEN + NAME + "{{ c.function.arguments | tojson }}" + CLOSE,
    "either": OPEN
    + NAME
    + "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    + "{{ c.function.arguments | tojson }}{% endif %}"
    + CLOSE,
    "text alone": OPEN + NAME + "{{ ' ' + c.function.arguments }}" + CLOSE,
    "text, and mappings as Python prints them": OPEN + NAME + "{{ c.function.arguments }}" + CLOSE,
    "none, so that calls are written as Hermes does": CHAT_TEMPLATE,
}
ARGUMENTS = {"expression": "1+2", "deep": [{"x": None}]}
TEXT = json.dumps(ARGUMENTS)


def conversation(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "user", "content": "3+4"},
    ]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_all_forms_of_a_call_are_printed_alike(template: str) -> None:
    chat = ChatRenderer(byte_tokenizer(template, eos="<|im_end|>"))
    function = {"name": "calculator", "arguments": ARGUMENTS}
    forms = (
        {"id": "c1", "type": "function", "function": function | {"arguments": TEXT}},
        {"id": "c1", "type": "function", "function": function},
        {"id": "c1", "name": "calculator", "arguments": TEXT},
    )
    printed = [chat.decode(chat.prompt(conversation([form]))) for form in forms]
    assert printed[0] == printed[1] == printed[2]
    assert "calculator" in printed[0] and TEXT in printed[0]
    assert len({text_size(conversation([form])) for form in forms}) == 1


def test_results_are_named_after_the_calls_that_they_answer() -> None:
    calls = [{"id": key, "function": {"name": name, "arguments": "{}"}} for key, name in (("c1", "add"), ("c2", "cut"))]
    results: list[dict[str, Any]] = [{"role": "tool", "content": "x", "tool_call_id": "c2"}, {"role": "tool"}]
    named = with_names([{"role": "assistant", "content": None, "tool_calls": calls}, *results])
    assert [message.get("name") for message in named] == [None, "cut", "add"]
    assert [message["content"] for message in named] == ["", "x", ""]


def test_calls_are_part_of_what_a_message_says() -> None:
    said = {"role": "assistant", "content": "So:", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    assert said_text(said) == 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


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
    end = read_answer(chat.parse(SampledTurn(kept, prompt, offered, stops)), tools=tools)
    for size in range(len(sampled) + 1):
        found = chat.settled(SampledTurn(sampled[:size], prompt, offered, stops))
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
    assert chat.settled(SampledTurn(chat.encode(said), chat.encode("x"), tools)) == expected


def test_what_may_belong_to_what_comes_is_held_back() -> None:
    assert without_beginnings("1+2+", ["+3"]) == "1+2"
    assert without_beginnings("1+2+3", ["+3"]) == "1+2+3"
    assert without_beginnings("a\ufffd", []) == "a"
    assert without_beginnings("aab", ["aabaa", "bx"]) == ""


QWEN = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{- \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments | tojson + '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LISTED = MISTRAL.replace(
    "'[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}{{ c.function.arguments | tojson }}",
    '\'[TOOL_CALLS][{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson'
    " + ', \"id\": \"' + c.id + '\"}]' }}",
)
INSTRUCTED = "{{ '<|im_start|>system\nCall as <tool_call>{}</tool_call>.<|im_end|>\n' }}" + QWEN
ENDS_CALLS = QWEN.replace("'\n<tool_call>\n{", "'\n<tool_call>\n<|im_end|>{")
OPENING_CHATS: dict[str, TokenizerFormat] = {
    "toy": ChatRenderer(byte_tokenizer(CHAT_TEMPLATE, eos="<|im_end|>")),
    "qwen": ChatRenderer(byte_tokenizer(QWEN, eos="<|im_end|>")),
    "instructed": ChatRenderer(byte_tokenizer(INSTRUCTED, eos="<|im_end|>")),
    "mistral": MistralFormat(byte_tokenizer(MISTRAL, eos="</s>")),
    "mistral 7": MistralFormat(byte_tokenizer(LISTED, eos="</s>")),
}


@pytest.mark.parametrize(
    ("family", "name", "rest"),
    [
        ("toy", "", '{"name": "f", "arguments": {"a": 1}}</tool_call>'),
        ("toy", "f", ' {"a": 1}}</tool_call>'),
        ("qwen", "", '\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        ("qwen", "f", ' {"a": 1}}\n</tool_call>'),
        ("instructed", "", '\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        ("instructed", "f", ' {"a": 1}}\n</tool_call>'),
        ("mistral", "", 'f[CALL_ID]abcdef123[ARGS]{"a": 1}'),
        ("mistral", "f", 'abcdef123[ARGS]{"a": 1}'),
        ("mistral 7", "", '[{"name": "f", "arguments": {"a": 1}}]'),
        ("mistral 7", "f", ' {"a": 1}, "id": "abcdef123"}]'),
    ],
)
def test_the_policy_makes_the_call_whole(family: str, name: str, rest: str) -> None:
    chat = OPENING_CHATS[family]
    opening = chat.call_opening(name)
    assert opening and chat.parse(SampledTurn(opening)).text
    (call,) = chat.parse(SampledTurn([*opening, *chat.encode(rest)])).calls
    assert (call.name, call.arguments) == ("f", {"a": 1})
    assert ("f" in chat.decode(opening)) == bool(name)


def test_nothing_is_forced_where_reasoning_comes_first_or_calls_are_unknown() -> None:
    thinking = [
        ChatRenderer(byte_tokenizer("{#- </think> -#}" + QWEN, eos="<|im_end|>")),
        MistralFormat(byte_tokenizer("{#- [THINK] -#}" + MISTRAL, eos="</s>")),
        HarmonyFormat(byte_tokenizer(HARMONY, eos="<|return|>")),
    ]
    assert [chat.call_opening(name) for chat in thinking for name in ("", "f")] == [[]] * 6
    assert OPENING_CHATS["qwen"].call_opening('f"}') == OPENING_CHATS["qwen"].call_opening("f" * 1000) == []


def test_an_opening_is_nothing_but_the_beginning_of_a_call() -> None:
    assert OPENING_CHATS["instructed"].call_opening("f") == OPENING_CHATS["qwen"].call_opening("f")
    assert "<|im_end|>{" in ENDS_CALLS
    assert ChatRenderer(byte_tokenizer(ENDS_CALLS, eos="<|im_end|>")).call_opening("f") == []


def test_the_template_is_not_rendered_for_each_opening() -> None:
    chat = ChatRenderer(tokenizer := byte_tokenizer(QWEN, eos="<|im_end|>"))
    expected = chat.call_opening("f")
    tokenizer.chat_template = "{{ this is no template"
    assert chat.call_opening("f") == expected != []
