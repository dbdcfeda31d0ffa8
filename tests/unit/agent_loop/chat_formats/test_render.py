"""The cache of tokens is bounded by bytes."""

from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import SampledTurn, TooLong, text_size
from rl_async.agent_loop.chat_formats.library import INSTALL, PROBES, LibraryFormat, agreement, installed
from rl_async.agent_loop.chat_formats.render import TOKEN_BYTES, ChatRenderer, TokenCache
from rl_async.agent_loop.tiny_tokenizer import read_demos, train_tokenizer
from rl_async.agent_loop.toy_tasks import make_data
from rl_async.errors import DataError
from tests.support.tiny_models import byte_tokenizer


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
