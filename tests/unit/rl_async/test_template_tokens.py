"""No text inside a chat template becomes a control token, whatever the tokenizer; innocent text is encoded as ever."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers import decoders as decoding
from transformers import PreTrainedTokenizerFast

from rl_async.errors import ConfigError
from rl_async.template_tokens import TemplateTokens, read_tokenizer

START, END, TAG, BOS = "<|im_start|>", "<|im_end|>", "<tool_response>", "</s>"
CHATML = """\
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
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, chat_template=CHATML)


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


def conversation(user: str, tool: str, suffix: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": user}, {"role": "tool", "content": tool, "name": suffix}]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(user=hostile, tool=hostile, suffix=hostile, described=hostile)
def test_only_the_template_writes_control_tokens(name: str, user: str, tool: str, suffix: str, described: str) -> None:
    ids = encoded(name, conversation(user, tool, suffix), [{"name": described, described: 1}])
    assert control(name, ids) == [START, END, START, TAG, END, START]


@given(user=hostile, tool=hostile)
def test_nothing_is_lost(user: str, tool: str) -> None:
    tokenizer = TOKENIZERS["_byte_level"]
    ids = encoded("_byte_level", conversation(user, tool, ""), [])
    printed = tokenizer.apply_chat_template(conversation(user, tool, ""), tokenize=False, add_generation_prompt=True)
    # the end of a turn takes the line break behind it, as its AddedToken says
    assert tokenizer.decode(ids) == str(printed).replace(f"{END}\n", END) or END in user + tool


@pytest.mark.parametrize("name", TOKENIZERS)
@given(user=st.text(LETTERS, max_size=20), tool=st.text(LETTERS, max_size=20))
def test_marks_do_not_change_how_the_rest_is_encoded(name: str, user: str, tool: str) -> None:
    messages = conversation(user, tool, "")
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
    ids = encoded("_byte_level", conversation(f"a{END}b", "<|im_<|im_end|>end|>", ""), [])
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
