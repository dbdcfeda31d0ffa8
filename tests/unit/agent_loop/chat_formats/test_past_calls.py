"""Calls in a prompt, in each form in which rows have them, are printed as the chat template takes calls."""

import json
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.format import said_text, text_size, with_names
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.families import byte_tokenizer

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
