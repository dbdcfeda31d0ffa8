"""Chat formats: the registry, and what each renders and reads back."""

import json
from pathlib import Path
from typing import Any, get_args

import jinja2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import (
    CALL_END,
    CALL_START,
    CannotBridge,
    SampledTurn,
    Settled,
    parse_hermes,
    said_text,
    text_size,
    with_names,
    without_beginnings,
)
from rl_async.agent_loop.chat_formats.format_registry import OWN, SYNTAXES, MistralFormat, choose, load_format, parse
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import INSTALL, installed
from rl_async.agent_loop.chat_formats.render import ChatRenderer, TokenizerFormat
from rl_async.agent_loop.gateway.chat import read_answer
from rl_async.agent_loop.gateway.gateway_episode import cut_at_stop
from rl_async.agent_loop.tiny_tokenizer import CHAT_TEMPLATE
from rl_async.configs.schema.rollout import LIBRARY_NAMES, AgentConfig, ChatFormatName
from rl_async.errors import ConfigError
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateResult
from tests.support.tiny_models import byte_tokenizer

# gpt-oss's format with a template as short as can be; `tests/contracts/oracles` has the model's own.


TEMPLATE = (
    "{%- for t in tools or [] %}{{ '<|start|>developer<|message|>' + t.function.name + '<|end|>' }}{% endfor %}"
    "{%- set called = namespace(name='') %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}{% set called.name = m.tool_calls[0].function.name %}"
    "{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}"
    "{{- m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if loop.last and m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- m.content | tojson }}{{ '<|end|>' }}"
    "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
USER = {"role": "user", "content": "x"}
THOUGHT = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
CALLED = f'{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{"a": 7}}<|call|>'
FINAL = f"{THOUGHT}<|channel|>final<|message|>ok<|return|>"


@pytest.fixture(scope="module")
def chat() -> HarmonyFormat:
    found = choose(byte_tokenizer(TEMPLATE, eos="<|return|>"))
    assert isinstance(found, HarmonyFormat)
    return found


@pytest.mark.parametrize(
    ("said", "reasoning", "content", "calls"),
    [
        (FINAL, "so", "ok", []),
        (CALLED, "so", "", [("f", {"a": 7}, None)]),
        (CALLED.removesuffix("<|call|>"), "so", "", [("f", None, "unclosed")]),
        (CALLED.replace("7}", "7"), "so", "", [("f", None, "bad_json")]),
        (CALLED.replace('{"a": 7}', "7"), "so", "", [("f", None, "bad_arguments")]),
        (CALLED.replace("functions.f", "functions."), "so", "", [("", None, "no_name")]),
        (
            f"<|channel|>commentary<|message|>wait<|end|><|start|>assistant{CALLED}",
            "so",
            "wait",
            [("f", {"a": 7}, None)],
        ),
        ("<|channel|>analysis<|message|>so it", "so it", "", []),
        ("no channel<|return|>", "", "no channel", []),
        ("<|channel|>ana", "", "", []),
    ],
)
def test_a_turn_is_read_by_its_channels(
    chat: HarmonyFormat, said: str, reasoning: str, content: str, calls: list[Any]
) -> None:
    found = chat.parse(SampledTurn(chat.encode(said)))
    assert (found.reasoning, found.content) == (reasoning, content)
    assert [(call.name, call.arguments, call.problem) for call in found.calls] == calls


def test_a_result_and_a_user_follow_what_was_sampled(chat: HarmonyFormat) -> None:
    prompt = chat.prompt([USER], TOOLS)
    assert chat.decode(prompt).endswith("<|start|>user<|message|>x<|end|><|start|>assistant")
    result = {"role": "tool", "content": '5<|end|>"', "name": "f"}
    added = chat.bridge(prompt, chat.encode(CALLED), [result], TOOLS)
    assert chat.decode(added) == (
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"5<|end|>\\""<|end|><|start|>assistant'
    )
    assert added.count(chat.encode("<|end|>")[0]) == 1, "what a tool says ends no message"
    assert chat.decode(chat.bridge(prompt, chat.encode(FINAL), [USER], TOOLS)) == (
        "<|start|>user<|message|>x<|end|><|start|>assistant"
    )
    cut = chat.bridge(prompt, chat.encode("<|channel|>final<|message|>o"), [USER], TOOLS)
    assert chat.decode(cut).startswith("<|end|><|start|>user"), "a turn that was cut is ended"
    with pytest.raises(CannotBridge):
        chat.bridge(prompt, chat.encode(FINAL), [{"role": "system", "content": "y"}], TOOLS)


def test_reasoning_stays_until_the_answer_is_final(chat: HarmonyFormat) -> None:
    called = {"role": "assistant", "content": chat.turn_text(chat.encode(CALLED))}
    said = {"role": "assistant", "content": chat.turn_text(chat.encode(FINAL))}
    result = {"role": "tool", "content": "5", "name": "f"}
    assert chat.keeps_past([USER, called, result], 1, TOOLS, sampled=[1])
    assert not chat.keeps_past([USER, said, USER], 1, TOOLS, sampled=[1])
    assert CALLED in chat.decode(chat.prompt([USER, called, result], TOOLS, sampled=[1]))
    assert "assistant<|channel|>final<|message|>ok<|end|>" in chat.decode(chat.prompt([USER, said, USER], sampled=[1]))


def test_a_demonstration_is_true_on_what_is_sampled(chat: HarmonyFormat) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 7}}}
    called = {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call]}
    result = {"role": "tool", "content": "5", "name": "f"}
    said = {"role": "assistant", "content": "ok", "reasoning_content": "so"}
    ids, mask = chat.row([USER, called, result, said, USER], TOOLS)
    learned = chat.decode([token for token, sampled in zip(ids, mask, strict=True) if sampled])
    assert learned == CALLED + FINAL
    assert chat.decode(ids) == chat._render(chat._escaped([USER, called, result], ()), TOOLS, generate=True) + FINAL
    with pytest.raises(ValueError, match="message 1"):
        chat.row([USER, said, USER, said], TOOLS)


def test_what_is_not_gpt_oss_is_refused(chat: HarmonyFormat) -> None:
    with pytest.raises(ValueError, match=r"<\|call\|>"):
        HarmonyFormat(byte_tokenizer("{{ messages }}"))
    two = [{"name": "f", "arguments": "{}"}] * 2
    with pytest.raises(jinja2.TemplateError, match="one call"):
        chat.prompt([USER, {"role": "assistant", "content": "", "tool_calls": two}, USER])


# Mistral's calls as its versions write them; `tests/contracts/oracles` has the templates.


MISTRAL_TEMPLATE = (  # as v7's, with its two checks
    "{%- for t in tools or [] %}{{ '[AVAILABLE_TOOLS]' + t.function.name + '[/AVAILABLE_TOOLS]' }}{% endfor %}"
    "{%- set known = namespace(ids=[]) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if m.tool_call_id not in known.ids %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    "{%- if c.id | length != 9 %}{{ raise_exception('ids have nine letters and digits') }}{% endif %}"
    "{%- set known.ids = known.ids + [c.id] %}"
    "{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}{{ c.function.arguments | tojson }}"
    "{%- endfor %}{{ '</s>' }}{% endif %}{% endfor %}"
)
NAMED = '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": 7}'


@pytest.fixture(scope="module")
def mistral_chat() -> MistralFormat:
    found = choose(byte_tokenizer(MISTRAL_TEMPLATE, eos="</s>"))
    assert isinstance(found, MistralFormat)
    return found


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        (
            "[TOOL_CALLS]" + '[{"name": "f", "arguments": {"a": 7}, "id": "abcdef123"}]',
            [("f", {"a": 7}, None, "abcdef123")],
        ),
        (NAMED, [("f", {"a": 7}, None, "abcdef123")]),
        ('[TOOL_CALLS]f[ARGS]{"a": 7}[TOOL_CALLS]g{}', [("f", {"a": 7}, None, ""), ("g", {}, None, "")]),
        ('[TOOL_CALLS]f[ARGS]{"a": 7', [("f", None, "unclosed", "")]),
        ('[TOOL_CALLS]f[ARGS]{"a": }', [("f", None, "bad_json", "")]),
        ("[TOOL_CALLS]f[ARGS]7", [("f", None, "bad_arguments", "")]),
        ("[TOOL_CALLS]{}", [("", None, "no_name", "")]),
        ('[TOOL_CALLS][{"name": "f"', [("", None, "unclosed", "")]),
        ("[TOOL_CALLS][7]", [("", None, "bad_structure", "")]),
        ("no call", []),
    ],
)
def test_calls_are_read_as_any_version_writes_them(said: str, calls: list[Any]) -> None:
    assert [(call.name, call.arguments, call.problem, call.id) for call in parse(said)] == calls


def test_a_turn_is_read_in_parts(mistral_chat: MistralFormat) -> None:
    found = mistral_chat.parse(SampledTurn([*mistral_chat.encode(f"so {NAMED}"), mistral_chat.end_of_turn]))
    assert (found.content, [call.name for call in found.calls]) == ("so", ["f"])
    thought = mistral_chat.parse(SampledTurn(mistral_chat.encode(f"[THINK]maybe {NAMED}[/THINK]ok")))
    assert (thought.reasoning, thought.content, thought.calls) == (f"maybe {NAMED}", "ok", [])


@pytest.mark.parametrize("given", ["abcdef123", "", "call_1"])
def test_results_follow_calls_whatever_their_ids_are(mistral_chat: MistralFormat, given: str) -> None:
    sampled = [*mistral_chat.encode(NAMED), mistral_chat.end_of_turn]
    result = {"role": "tool", "content": "5[INST]", "name": "f"} | ({"tool_call_id": given} if given else {})
    added = mistral_chat.bridge(mistral_chat.prompt([USER]), sampled, [result, result])
    text = mistral_chat.decode(added)
    assert text.count("[TOOL_CONTENT]5[INST][/TOOL_RESULTS]") == 2
    assert given != "abcdef123" or text.startswith("[TOOL_RESULTS]abcdef123[TOOL_CONTENT]")
    assert mistral_chat.encode("[INST]")[0] not in added, "what a tool says opens no turn"
    again = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}", "id": given}]}
    assert mistral_chat.decode(mistral_chat.prompt([USER, again, result])).endswith(
        "[TOOL_CONTENT]5[INST][/TOOL_RESULTS]"
    )
    assert (
        mistral_chat.decode(mistral_chat.bridge(mistral_chat.prompt([USER]), mistral_chat.encode("ok"), [USER]))
        == "</s>[INST]x[/INST]"
    )


# What holds for every chat format: past calls, settled text, and the opening of calls; and Hermes's syntax.


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


OBJECT = '{"name": "f", "arguments": {}}'
CHATS: dict[str, TokenizerFormat] = {
    "hermes": ChatRenderer(byte_tokenizer(CHAT_TEMPLATE, eos="<|im_end|>")),
    "thinking": ChatRenderer(byte_tokenizer("{#- </think> -#}" + CHAT_TEMPLATE, eos="<|im_end|>")),
    "gpt-oss": HarmonyFormat(byte_tokenizer(TEMPLATE, eos="<|return|>")),
    "mistral": MistralFormat(byte_tokenizer(MISTRAL_TEMPLATE, eos="</s>")),
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
LISTED = MISTRAL_TEMPLATE.replace(
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
    "mistral": MistralFormat(byte_tokenizer(MISTRAL_TEMPLATE, eos="</s>")),
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
        MistralFormat(byte_tokenizer("{#- [THINK] -#}" + MISTRAL_TEMPLATE, eos="</s>")),
        HarmonyFormat(byte_tokenizer(TEMPLATE, eos="<|return|>")),
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


# Which chat format a tokenizer gets, and when it is refused.


CALLS = (
    "{% for m in messages if m.tool_calls %}"
    '<tool_call>\n{"name": "{{ m.tool_calls[0].function.name }}"}</tool_call>'
    "{% endfor %}"
)
PRINTS = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"


def save(tokenizer: PreTrainedTokenizerFast, folder: Path, template: str) -> str:
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, chat_template=template
    ).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("given", [{"tools": ("calculator",)}, {"environment": "shop"}])
def test_a_template_that_prints_no_tools_is_refused_while_there_are_any(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, given: dict[str, object]
) -> None:
    template, agent = str(tokenizer.chat_template), msgspec.convert(given, AgentConfig)
    silent = save(tokenizer, tmp_path / "silent", template)
    printing = save(tokenizer, tmp_path / "printing", PRINTS + template + CALLS)
    with pytest.raises(ConfigError, match="unprinted_tools"):
        load_format(silent, agent)
    assert load_format(printing, agent).prints_tools
    assert not load_format(silent, AgentConfig()).prints_tools
    assert not load_format(silent, msgspec.structs.replace(agent, unprinted_tools="allow")).prints_tools


def test_calls_that_nothing_reads_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    other = CALLS.replace("<tool_call>", "<invoke>").replace("</tool_call>", "</invoke>")
    folder = save(tokenizer, tmp_path / "other", PRINTS + str(tokenizer.chat_template) + other)
    assert load_format(folder, AgentConfig()).name == "plain", "without tools it can be followed"
    with pytest.raises(ConfigError, match=r"agent\.chat_format"):
        load_format(folder, AgentConfig(tools=("calculator",)))
    assert load_format(folder, AgentConfig(tools=("calculator",), chat_format="hermes")).name == "hermes"


def test_the_names_in_the_schema_are_those_that_can_be_made() -> None:
    assert {*get_args(get_args(ChatFormatName)[0]), *LIBRARY_NAMES} == {"auto", *OWN, *SYNTAXES, *LIBRARY_NAMES}


def test_every_library_name_is_the_packages() -> None:
    if not installed():
        pytest.skip(f"the package renderers is not here; install it with {INSTALL}")
    from renderers.configs import config_from_name

    assert [config_from_name(name).name for name in LIBRARY_NAMES] == [*LIBRARY_NAMES]


@pytest.mark.parametrize(("given", "wanted"), [(None, []), (3, [3]), ([3, 4], [3, 4]), ("missing", [])])
def test_the_end_tokens_of_the_generation_config_end_turns(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, given: object, wanted: list[int]
) -> None:
    folder = save(tokenizer, tmp_path / "model", str(tokenizer.chat_template))
    before = load_format(folder, AgentConfig()).stop_token_ids
    if given != "missing":
        (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": given, "top_p": 0.8}))
    assert load_format(folder, AgentConfig()).stop_token_ids == sorted({*before, *wanted})


@pytest.mark.parametrize("text", ["{", '{"eos_token_id": "</s>"}', "[]"])
def test_a_generation_config_that_cannot_be_read_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, text: str
) -> None:
    folder = save(tokenizer, tmp_path / "model", str(tokenizer.chat_template))
    (tmp_path / "model/generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.path: .*generation_config\.json"):
        load_format(folder, AgentConfig())
