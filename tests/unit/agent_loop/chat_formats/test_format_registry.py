"""Which chat format a tokenizer gets, and when it is refused."""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format_registry import OWN, SYNTAXES, load_format
from rl_async.agent_loop.chat_formats.library import INSTALL, installed
from rl_async.configs.schema.rollout import LIBRARY_NAMES, AgentConfig, ChatFormatName
from rl_async.errors import ConfigError

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
