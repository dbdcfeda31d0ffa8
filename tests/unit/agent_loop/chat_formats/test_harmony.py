"""gpt-oss's format with a template as short as can be; `tests/contracts/oracles` has the model's own."""

from typing import Any

import jinja2
import pytest

from rl_async.agent_loop.chat_formats.format import CannotBridge, SampledTurn
from rl_async.agent_loop.chat_formats.format_registry import choose
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from tests.support.tiny_models import byte_tokenizer

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
