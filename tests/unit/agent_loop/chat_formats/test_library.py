"""What the adapter of the package's families adds to them; ``tests/contracts/oracles`` compares them with others."""

from typing import Any

import jinja2
import pytest

from rl_async.agent_loop.chat_formats.format import SampledTurn
from rl_async.agent_loop.chat_formats.library import INSTALL, PROBES, LibraryFormat, agreement, installed
from tests.support.tiny_models import byte_tokenizer

needs_package = pytest.mark.skipif(not installed(), reason=f"the package renderers is not here: {INSTALL}")

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{# TOKENS #}"
XML = "<think></think><tool_call></tool_call><tool_response></tool_response>"
KIMI = (
    "<|im_user|><|im_assistant|><|im_system|><|im_middle|><|tool_calls_section_begin|><|tool_calls_section_end|>"
    "<|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|>[BOS][EOS]"
)
USER = {"role": "user", "content": "x"}
TOOLS = [
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
    prompt = qwen.prompt([USER], TOOLS)
    assert qwen.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
    call = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    said = [*qwen.encode(f"so\n</think>\n\nok\n\n{call}"), qwen.stop_token_ids[-1]]
    found = qwen.parse(SampledTurn(said, prompt, TOOLS))
    assert (found.reasoning, found.content) == ("so", "ok")
    assert [(made.name, made.arguments, made.problem) for made in found.calls] == [("f", {"a": 7}, None)]
    cut = qwen.parse(SampledTurn(said[:-20], prompt, TOOLS))
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
        printed = kimi.decode(kimi.prompt([USER, {"role": "assistant", **said}, result], TOOLS, sampled=own))
        assert sampled in printed and "## Return of functions.f:3" in printed
