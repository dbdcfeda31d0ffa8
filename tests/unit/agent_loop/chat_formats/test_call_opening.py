"""How a turn begins that must be a call: as the format writes calls, so that the rest of one makes it whole."""

import pytest

from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.mistral import MistralFormat
from rl_async.agent_loop.chat_formats.render import ChatRenderer, TokenizerFormat
from rl_async.agent_loop.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.families import byte_tokenizer
from tests.unit.agent_loop.chat_formats.test_harmony import TEMPLATE as HARMONY
from tests.unit.agent_loop.chat_formats.test_mistral import TEMPLATE as MISTRAL

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
CHATS: dict[str, TokenizerFormat] = {
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
    chat = CHATS[family]
    opening = chat.call_opening(name)
    assert opening and chat.parse(opening).text
    (call,) = chat.parse([*opening, *chat.encode(rest)]).calls
    assert (call.name, call.arguments) == ("f", {"a": 1})
    assert ("f" in chat.decode(opening)) == bool(name)


def test_nothing_is_forced_where_reasoning_comes_first_or_calls_are_unknown() -> None:
    thinking = [
        ChatRenderer(byte_tokenizer("{#- </think> -#}" + QWEN, eos="<|im_end|>")),
        MistralFormat(byte_tokenizer("{#- [THINK] -#}" + MISTRAL, eos="</s>")),
        HarmonyFormat(byte_tokenizer(HARMONY, eos="<|return|>")),
    ]
    assert [chat.call_opening(name) for chat in thinking for name in ("", "f")] == [[]] * 6
    assert CHATS["qwen"].call_opening('f"}') == CHATS["qwen"].call_opening("f" * 1000) == []


def test_an_opening_is_nothing_but_the_beginning_of_a_call() -> None:
    assert CHATS["instructed"].call_opening("f") == CHATS["qwen"].call_opening("f")
    assert "<|im_end|>{" in ENDS_CALLS
    assert ChatRenderer(byte_tokenizer(ENDS_CALLS, eos="<|im_end|>")).call_opening("f") == []


def test_the_template_is_not_rendered_for_each_opening() -> None:
    chat = ChatRenderer(tokenizer := byte_tokenizer(QWEN, eos="<|im_end|>"))
    expected = chat.call_opening("f")
    tokenizer.chat_template = "{{ this is no template"
    assert chat.call_opening("f") == expected != []
