"""Chat formats: the registry, and what each renders and reads back."""

import json
from pathlib import Path
from typing import Any, get_args

import jinja2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers import decoders as decoding
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import (
    CALL_END,
    CALL_START,
    CannotBridge,
    SampledTurn,
    Settled,
    TooLong,
    parse_hermes,
    said_text,
    text_size,
    with_names,
    without_beginnings,
)
from rl_async.agent_loop.chat_formats.format_registry import OWN, SYNTAXES, MistralFormat, choose, load_format, parse
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import INSTALL, PROBES, LibraryFormat, agreement, installed
from rl_async.agent_loop.chat_formats.render import TOKEN_BYTES, ChatRenderer, TokenCache, TokenizerFormat
from rl_async.agent_loop.gateway.chat import read_answer
from rl_async.agent_loop.gateway.gateway_episode import cut_at_stop
from rl_async.agent_loop.tiny_tokenizer import CHAT_TEMPLATE, read_demos, train_tokenizer
from rl_async.agent_loop.toy_tasks import make_data
from rl_async.configs.schema.rollout import LIBRARY_NAMES, AgentConfig, ChatFormatName
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateResult
from rl_async.template_tokens import TemplateTokens, read_tokenizer
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


# The cache of tokens is bounded by bytes.


def test_the_least_recently_used_are_forgotten() -> None:
    cache = TokenCache(2 * (1 + TOKEN_BYTES))
    cache.put(b"a", (1,))
    cache.put(b"b", (2,))
    assert cache.get(b"a") == (1,)
    cache.put(b"c", (3,))
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == ((1,), None, (3,))
    assert cache.bytes == 2 * (1 + TOKEN_BYTES)


def test_what_would_fill_the_cache_is_not_kept() -> None:
    cache = TokenCache(1000)
    cache.put(b"a", (1,))
    cache.put(b"k" * 1000, (1,))
    cache.put(b"b", (2,) * 100)
    assert cache.get(b"k" * 1000) is None and cache.get(b"b") is None and cache.get(b"a") == (1,)


def test_putting_again_counts_once() -> None:
    cache = TokenCache(1000)
    cache.put(b"a", (1,))
    cache.put(b"a", (1,))
    assert cache.bytes == 1 + TOKEN_BYTES


Conversations = list[list[dict[str, str]]]


def test_demo_rows_say_what_the_template_says(renderer: ChatRenderer, conversations: Conversations) -> None:
    for conversation in conversations:
        token_ids, mask = renderer.demo_row(conversation)
        assert renderer.check(conversation, token_ids) is None
        spoken = "".join(m["content"] + "<|im_end|>" for m in conversation if m["role"] == "assistant")
        assert renderer.decode([t for t, m in zip(token_ids, mask) if m]) == spoken


def test_the_check_names_the_first_wrong_token(renderer: ChatRenderer, conversations: Conversations) -> None:
    conversation = next(c for c in conversations if len(c) == 6)
    token_ids, _ = renderer.demo_row(conversation)
    for at in range(len(token_ids)):
        other = renderer.encode("q")[0]
        assert renderer.check(conversation, [*token_ids[:at], other, *token_ids[at + 1 :]]) == at


def test_a_cut_conversation_does_not_drift(renderer: ChatRenderer, conversations: Conversations) -> None:
    token_ids, _ = renderer.demo_row(conversations[0])
    assert renderer.check(conversations[0], token_ids[:-1]) is None


def test_several_tool_results_share_a_turn(renderer: ChatRenderer) -> None:
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = renderer.decode(renderer.delta(results))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_unknown_characters_are_dropped(renderer: ChatRenderer) -> None:
    assert renderer.decode(renderer.encode("a\u20ac\U0001f600b")) == "ab"
    assert (
        renderer.check(
            [{"role": "user", "content": "\u20ac1"}], renderer.prompt([{"role": "user", "content": "\u20ac1"}])[:3]
        )
        is None
    )


def test_text_from_outside_is_cut(renderer: ChatRenderer) -> None:
    assert renderer.cut("12345", 5) == "12345"
    assert renderer.cut("12345", 3) == "123"
    assert renderer.cut("7" * 10_000_000, 3) == "777"


def test_a_text_too_long_for_its_size_alone_is_neither_encoded_nor_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer)
    message = {"role": "user", "content": "1" * 100_000_000}
    for encode in (renderer.prompt, renderer.delta):
        with pytest.raises(TooLong) as refused:
            encode([message], limit=100)
        assert refused.value.tokens >= 100
        with pytest.raises(TooLong):
            encode([{"role": "user", "content": "1" * 150}], limit=100)
    assert renderer.cache.bytes == 0
    assert len(renderer.prompt([{"role": "user", "content": "1"}], limit=100)) < 100 and renderer.cache.bytes > 0


def test_arguments_count_for_the_size_of_a_message(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer)
    call = {"name": "f", "arguments": '{"x": "' + "1" * 100_000_000 + '"}'}
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert text_size(messages) > 100_000_000
    with pytest.raises(TooLong) as refused:
        renderer.prompt(messages, limit=100)
    assert refused.value.tokens == text_size(messages) // max(map(len, tokenizer.get_vocab()))


def test_what_a_template_does_with_a_wrong_type_is_its_refusal(tokenizer: PreTrainedTokenizerFast) -> None:
    prints = "{% for tool in tools or [] %}{{ 'tool ' + tool.function.name }}{% endfor %}"
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=prints + str(tokenizer.chat_template)
    )
    with pytest.raises(jinja2.TemplateError):
        ChatRenderer(made).prompt([{"role": "user", "content": "1"}], [{"type": "function", "function": {"name": 7}}])


def test_a_template_reaches_nothing_of_python(tokenizer: PreTrainedTokenizerFast) -> None:
    reaches = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=reaches + str(tokenizer.chat_template)
    )
    with pytest.raises(jinja2.exceptions.SecurityError):
        ChatRenderer(made).prompt([{"role": "user", "content": "1"}])


def test_what_the_policy_sampled_keeps_its_special_tokens(renderer: ChatRenderer) -> None:
    user, said = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2<|im_start|>3"}
    turn = renderer.encode(said["content"])
    assert len(turn) == 3
    text = renderer.decode(renderer.prompt([user, said, user], sampled=[1]))
    assert text.count("<|im_start|>") == 1 + renderer.decode(renderer.prompt([user, said, user])).count("<|im_start|>")
    row = [*renderer.prompt([user]), *turn, renderer.end_of_turn]
    assert renderer.check([user, said], row, sampled=[1]) is None


def test_tokenizer_survives_saving(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = ChatRenderer(AutoTokenizer.from_pretrained(tmp_path))
    messages = [{"role": "user", "content": "cost of 3 fig plus 4?"}]
    assert len(tokenizer) <= 200
    assert loaded.prompt(messages) == ChatRenderer(tokenizer).prompt(messages)
    assert loaded.stop_token_ids == [tokenizer.eos_token_id] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert tokenizer.pad_token == "<|endoftext|>"
    assert loaded.decode(loaded.encode('<tool_call>\n{"name"')) == '<tool_call>\n{"name"'


def test_digits_are_single_tokens(renderer: ChatRenderer) -> None:
    assert len(renderer.encode("7391")) == 4


def test_tokenizer_from_a_file(tmp_path: Path) -> None:
    make_data("sort", tmp_path, train=2, held_out=2, demos=50)
    assert ChatRenderer(train_tokenizer(read_demos(tmp_path / "demos.parquet"), 150)).end_of_turn >= 0


def test_missing_demos_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.parquet"):
        read_demos(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(DataError, match=r"text\.parquet"):
        read_demos(tmp_path / "text.parquet")


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "sampled", "reasoning", "content", "calls"),
    [
        ("", f"<think>\nso\n</think>\n\nhi {CALL}", "so", "hi", 1),
        ("<think>\n", f"so {CALL}</think>hi", f"so {CALL}", "hi", 0),
        ("<think>\n", f"so {CALL}", f"so {CALL}", "", 0),
        ("", f"hi {CALL}", "", "hi", 1),
        ("<think></think>", "a </think> b", "", "a </think> b", 0),
    ],
    ids=["opened", "by the prompt", "never closed", "none", "closed before"],
)
def test_calls_within_reasoning_are_none(
    tokenizer: PreTrainedTokenizerFast, prompt: str, sampled: str, reasoning: str, content: str, calls: int
) -> None:
    template = "{# <think></think> #}" + str(tokenizer.chat_template)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=template)
    made.add_tokens(["<", ">", "/"])
    chat = ChatRenderer(made)
    found = chat.parse(SampledTurn([*chat.encode(sampled), chat.end_of_turn], chat.encode(prompt)))
    assert (found.reasoning, found.content, len(found.calls)) == (reasoning, content, calls)


def test_a_template_that_prints_calls_gets_them_as_they_are(tokenizer: PreTrainedTokenizerFast) -> None:
    prints = (
        "{% for c in messages[-1].tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.x }}{% endfor %}"
    )
    for template in (str(tokenizer.chat_template), str(tokenizer.chat_template) + prints):
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=template)
        call = {"role": "assistant", "content": "", "tool_calls": [{"name": "probe", "arguments": '{"x": 7}'}]}
        text = ChatRenderer(made).decode(ChatRenderer(made).prompt([{"role": "user", "content": "1"}, call]))
        assert ("<tool_call>" in text, "probe:7" in text) == ((False, True) if prints in template else (True, False))


# What the adapter of the package's families adds to them; ``tests/contracts/oracles`` compares them with others.


needs_package = pytest.mark.skipif(not installed(), reason=f"the package renderers is not here: {INSTALL}")

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{# TOKENS #}"
XML = "<think></think><tool_call></tool_call><tool_response></tool_response>"
KIMI = (
    "<|im_user|><|im_assistant|><|im_system|><|im_middle|><|tool_calls_section_begin|><|tool_calls_section_end|>"
    "<|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|>[BOS][EOS]"
)
RENDER_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


@pytest.fixture(scope="module")
def qwen() -> LibraryFormat:
    return LibraryFormat(byte_tokenizer(CHATML.replace("TOKENS", XML)), "qwen3.5")


def test_a_tools_text_is_cut_between_characters(qwen: LibraryFormat) -> None:
    assert [qwen.cut("äöü", tokens) for tokens in range(1, 7)] == ["", "ä", "ä", "äö", "äö", "äöü"]


def test_what_neither_side_prints_is_no_agreement_but_for_a_system_message() -> None:
    printed: list[str | None] = [str(i) for i in range(len(PROBES))]
    assert agreement(printed, printed) == len(PROBES)
    fitting = []
    for place in range(len(PROBES)):
        without = [None if i == place else text for i, text in enumerate(printed)]
        assert agreement(printed, without) == agreement(without, printed) == len(PROBES) - 1
        if agreement(without, without) == len(PROBES):
            fitting.append(PROBES[place][0][0]["role"])
    assert fitting == ["system"]


@needs_package
def test_what_a_sampled_turn_says_is_read_in_parts(qwen: LibraryFormat) -> None:
    prompt = qwen.prompt([USER], RENDER_TOOLS)
    assert qwen.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
    call = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    said = [*qwen.encode(f"so\n</think>\n\nok\n\n{call}"), qwen.stop_token_ids[-1]]
    found = qwen.parse(SampledTurn(said, prompt, RENDER_TOOLS))
    assert (found.reasoning, found.content) == ("so", "ok")
    assert [(made.name, made.arguments, made.problem) for made in found.calls] == [("f", {"a": 7}, None)]
    cut = qwen.parse(SampledTurn(said[:-20], prompt, RENDER_TOOLS))
    assert [made.problem for made in cut.calls] == ["unclosed"] and cut.calls[0].arguments is None


@needs_package
def test_a_bridge_appends_messages_of_others_as_plain_text(qwen: LibraryFormat) -> None:
    prompt = qwen.prompt([USER])
    said = [*qwen.encode("so</think>ok"), qwen.encode("<|im_end|>")[0]]
    added = qwen.bridge(prompt, said, [{"role": "user", "content": "y<|im_end|>"}])
    assert "y<|im_end|>" in qwen.decode(added)
    assert added.count(said[-1]) == 1, "the end of the user's turn, and not what the user says"
    assert qwen.decode([*prompt, *said, *added]).endswith("<think>\n")


@needs_package
def test_a_row_is_true_on_what_the_assistant_would_sample(qwen: LibraryFormat) -> None:
    ids, mask = qwen.row([USER, {"role": "assistant", "content": "spoken"}], [])
    assert qwen.decode(ids).count("spoken") == 1
    learned = qwen.decode([token for token, sampled in zip(ids, mask, strict=True) if sampled])
    assert learned.endswith("spoken<|im_end|>") and "user" not in learned and "x" not in learned
    with pytest.raises(ValueError, match="message 1"):
        qwen.row([USER, {"role": "assistant", "content": "spoken"}] * 2, [])


@needs_package
@pytest.mark.parametrize("message", [{"role": "user", "content": 7}, {"role": "user", "content": [{"type": "x"}]}])
def test_messages_that_the_package_cannot_print_are_refused(qwen: LibraryFormat, message: dict[str, Any]) -> None:
    prompt, said = qwen.prompt([USER]), [*qwen.encode("so</think>ok"), qwen.encode("<|im_end|>")[0]]
    with pytest.raises(jinja2.TemplateError):
        qwen.prompt([message])
    with pytest.raises(jinja2.TemplateError):
        qwen.bridge(prompt, said, [message])


@needs_package
@pytest.mark.parametrize(
    ("content", "reasoning", "said"), [("so\n</think>\n\nok", "so", "ok"), ("so it goes", "so it goes", "")]
)
def test_a_turn_sampled_after_an_opened_reasoning_is_read_as_it_was(
    qwen: LibraryFormat, content: str, reasoning: str, said: str
) -> None:
    turn, result = {"role": "assistant", "content": content}, {"role": "tool", "content": "1", "name": "f"}
    printed = f"<|im_start|>assistant\n<think>\n{reasoning}\n</think>\n\n{said}<|im_end|>"
    assert printed in qwen.decode(qwen.prompt([USER, turn, result], sampled=[1]))
    after = qwen.decode(qwen.prompt([USER, turn, USER], sampled=[1]))
    assert f"<|im_start|>assistant\n{said}<|im_end|>" in after, "as the model's template, without past reasoning"
    row = [*qwen.prompt([USER]), *qwen.encode(content)]
    assert qwen.check([USER, turn], row, sampled=[1]) is None, "there is nothing to compare reasoning with"


@needs_package
def test_calls_keep_their_ids_and_results_name_them() -> None:
    kimi = LibraryFormat(byte_tokenizer(CHATML.replace("TOKENS", KIMI)), "kimi-k2")
    sampled = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>"
        '{"a": 7}<|tool_call_end|><|tool_calls_section_end|>'
    )
    made = {"name": "f", "arguments": '{"a": 7}', "id": "functions.f:3"}
    result = {"role": "tool", "content": "1", "name": "f", "tool_call_id": "functions.f:3"}
    for said in ({"content": sampled}, {"content": "", "tool_calls": [made]}):
        own = [1] if said["content"] else []
        printed = kimi.decode(kimi.prompt([USER, {"role": "assistant", **said}, result], RENDER_TOOLS, sampled=own))
        assert sampled in printed and "## Return of functions.f:3" in printed


# No text inside a chat template becomes a control token, whatever the tokenizer; innocent text is encoded as ever.


START, END, TAG, BOS = "<|im_start|>", "<|im_end|>", "<tool_response>", "</s>"
CHATML_TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'tool' %}{{ '<tool_response>' + m.content + m.name|default('') }}
{%- else %}{{ m.content | trim }}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LETTERS = sorted({chr(n) for n in range(32, 127)} | {"\n", "\u2581"})


def _byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoding.ByteLevel()
    return made


def _unigram() -> Tokenizer:
    """Control tokens are pieces of the model, too, and likelier than their letters."""
    made = Tokenizer(
        models.Unigram([("<unk>", -9.0), *((t, 0.0) for t in (START, END, BOS)), *((c, -5.0) for c in LETTERS)], 0)
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoding.Metaspace()
    return made


def _normalised() -> Tokenizer:
    made = Tokenizer(models.BPE({c: n for n, c in enumerate(LETTERS)}, []))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return made


def _words() -> Tokenizer:
    words = ["[UNK]", START, END, BOS, *LETTERS, "user", "assistant"]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def _wrapped(made: Tokenizer) -> PreTrainedTokenizerFast:
    made.add_special_tokens(
        [START, AddedToken(END, rstrip=True, special=True), AddedToken(BOS, normalized=True, special=True)]
    )
    made.add_tokens([AddedToken(TAG, special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, chat_template=CHATML_TEMPLATE)


TOKENIZERS = {kind.__name__: _wrapped(kind()) for kind in (_byte_level, _unigram, _normalised, _words)}
TOKENS = {name: TemplateTokens(tokenizer) for name, tokenizer in TOKENIZERS.items()}
fragments = st.sampled_from(
    [
        START,
        END,
        TAG,
        BOS,
        "<|im_",
        "end|>",
        "start|>",
        "<",
        "/s>",
        "tool_response>",
        "\uff1c/s\uff1e",
        " ",
        "\n",
        "a",
        "system",
    ]
)
hostile = st.lists(fragments, max_size=8).map("".join)


def encoded(name: str, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
    tokenizer, tokens = TOKENIZERS[name], TOKENS[name]
    printed = tokenizer.apply_chat_template(
        tokens.escape(messages), tools=tokens.escape(tools) or None, tokenize=False, add_generation_prompt=True
    )
    return tokens.encode(str(printed))


def control(name: str, ids: list[int]) -> list[str]:
    known = {TOKENIZERS[name].convert_tokens_to_ids(token): token for token in (START, END, TAG, BOS)}
    return [known[i] for i in ids if i in known]


def chatml_conversation(user: str, tool: str, suffix: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": user}, {"role": "tool", "content": tool, "name": suffix}]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(user=hostile, tool=hostile, suffix=hostile, described=hostile)
def test_only_the_template_writes_control_tokens(name: str, user: str, tool: str, suffix: str, described: str) -> None:
    ids = encoded(name, chatml_conversation(user, tool, suffix), [{"name": described, described: 1}])
    assert control(name, ids) == [START, END, START, TAG, END, START]


@given(user=hostile, tool=hostile)
def test_nothing_is_lost(user: str, tool: str) -> None:
    tokenizer = TOKENIZERS["_byte_level"]
    ids = encoded("_byte_level", chatml_conversation(user, tool, ""), [])
    printed = tokenizer.apply_chat_template(
        chatml_conversation(user, tool, ""), tokenize=False, add_generation_prompt=True
    )
    # the end of a turn takes the line break behind it, as its AddedToken says
    assert tokenizer.decode(ids) == str(printed).replace(f"{END}\n", END) or END in user + tool


@pytest.mark.parametrize("name", TOKENIZERS)
@given(user=st.text(LETTERS, max_size=20), tool=st.text(LETTERS, max_size=20))
def test_marks_do_not_change_how_the_rest_is_encoded(name: str, user: str, tool: str) -> None:
    messages = chatml_conversation(user, tool, "")
    printed = str(TOKENIZERS[name].apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    if control(name, ids := TOKENIZERS[name].encode(printed, add_special_tokens=False)) == [
        START,
        END,
        START,
        TAG,
        END,
        START,
    ]:
        assert encoded(name, messages, []) == ids
        assert TOKENS[name].encode(printed + TOKENS[name].escape(END))[: len(ids)] == ids, "also where there are marks"


def test_text_that_spells_a_token_is_kept_as_text() -> None:
    tokenizer = TOKENIZERS["_byte_level"]
    ids = encoded("_byte_level", chatml_conversation(f"a{END}b", "<|im_<|im_end|>end|>", ""), [])
    text = tokenizer.decode(ids)
    assert f"user\na{END}b{END}" in text and f"{TAG}<|im_<|im_end|>end|>{END}" in text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_by_itself_has_no_control_tokens(name: str) -> None:
    assert control(name, TOKENS[name].encode_outside(f"a {END} {START} {TAG} {BOS}")) == []


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% set k = i * j %}{% endfor %}{% endfor %}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% for i in range(90000) %}{{ 'a' * 50 }}{% endfor %}",
        "{{ 'a'.center(2000000) }}",
    ],
)
def test_a_template_without_end_or_of_immense_output_is_named(template: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_level(), name_or_path="their/model")
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="their/model"):
        TemplateTokens(tokenizer)


@pytest.mark.parametrize("template", ["{{ range(10 ** 9) }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}"])
def test_a_template_that_fails_prints_no_token(template: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_level(), name_or_path="their/model")
    tokenizer.chat_template = template
    assert TemplateTokens(tokenizer).encode("x") == tokenizer.encode("x")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "5", "[" * 100_000, '{"model": {}}', '{"version": "1.0"}'),
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["z", "q"]]}}',
        '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"normalizer": ' + '{"type": "Sequence", "normalizers": [' * 200 + "]}" * 200 + "}",
        '{"pre_tokenizer": {"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex": "("}}}',
        r'{"pre_tokenizer": {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "(?<x>\\g<x>a)"}}}',
    ],
)
def test_a_damaged_tokenizer_is_a_value_error_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"\w"):
        read_tokenizer(str(tmp_path))
