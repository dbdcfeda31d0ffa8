"""Which chat format a tokenizer gets, and when it is refused."""

from pathlib import Path

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.registry import load_format
from rl_async.configs.schema.rollout import AgentConfig
from rl_async.errors import ConfigError

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
    silent, printing = (
        save(tokenizer, tmp_path / str(i), text) for i, text in enumerate((template, PRINTS + template))
    )
    with pytest.raises(ConfigError, match="agent.unprinted_tools"):
        load_format(silent, agent)
    assert load_format(printing, agent).prints_tools
    assert not load_format(silent, AgentConfig()).prints_tools
    assert not load_format(silent, msgspec.structs.replace(agent, unprinted_tools="allow")).prints_tools
