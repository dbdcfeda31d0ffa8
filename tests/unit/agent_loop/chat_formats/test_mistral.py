"""Mistral's calls as its versions write them; `tests/contracts/oracles` has the templates."""

from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.format import SampledTurn
from rl_async.agent_loop.chat_formats.format_registry import choose
from rl_async.agent_loop.chat_formats.mistral import MistralFormat, parse
from tests.support.tiny_models import byte_tokenizer

TEMPLATE = (  # as v7's, with its two checks
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
USER = {"role": "user", "content": "x"}
NAMED = '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": 7}'


@pytest.fixture(scope="module")
def chat() -> MistralFormat:
    found = choose(byte_tokenizer(TEMPLATE, eos="</s>"))
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


def test_a_turn_is_read_in_parts(chat: MistralFormat) -> None:
    found = chat.parse(SampledTurn([*chat.encode(f"so {NAMED}"), chat.end_of_turn]))
    assert (found.content, [call.name for call in found.calls]) == ("so", ["f"])
    thought = chat.parse(SampledTurn(chat.encode(f"[THINK]maybe {NAMED}[/THINK]ok")))
    assert (thought.reasoning, thought.content, thought.calls) == (f"maybe {NAMED}", "ok", [])


@pytest.mark.parametrize("given", ["abcdef123", "", "call_1"])
def test_results_follow_calls_whatever_their_ids_are(chat: MistralFormat, given: str) -> None:
    sampled = [*chat.encode(NAMED), chat.end_of_turn]
    result = {"role": "tool", "content": "5[INST]", "name": "f"} | ({"tool_call_id": given} if given else {})
    added = chat.bridge(chat.prompt([USER]), sampled, [result, result])
    text = chat.decode(added)
    assert text.count("[TOOL_CONTENT]5[INST][/TOOL_RESULTS]") == 2
    assert given != "abcdef123" or text.startswith("[TOOL_RESULTS]abcdef123[TOOL_CONTENT]")
    assert chat.encode("[INST]")[0] not in added, "what a tool says opens no turn"
    again = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}", "id": given}]}
    assert chat.decode(chat.prompt([USER, again, result])).endswith("[TOOL_CONTENT]5[INST][/TOOL_RESULTS]")
    assert chat.decode(chat.bridge(chat.prompt([USER]), chat.encode("ok"), [USER])) == "</s>[INST]x[/INST]"
