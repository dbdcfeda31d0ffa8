"""The schemas by which the queue counts prompts: of the built-in tools and of the config's, also a user's."""

from pathlib import Path

import msgspec
import pytest

from rl_async.configs.load import load_config
from rl_async.errors import ConfigError
from rl_async.launcher.plan.trials import write_tool_schemas
from rl_async.transfer_queue.chat_messages import read_schemas


def test_a_users_tool_is_loaded_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'print("loading")\n\n\ndef look(query: str) -> str:\n    """Look it up."""\n    return query\n'
    )
    name = f"{tmp_path}/mine.py:look"
    config = load_config("calculator", [f"agent.tools=[calculator, '{name}']"])
    write_tool_schemas(config, tmp_path)
    schemas = read_schemas(tmp_path)
    assert {"calculator", "python", "bash", name} == schemas.keys()
    assert schemas[name]["function"]["name"] == "look"
    agent = msgspec.structs.replace(config.agent, tools=(f"{tmp_path}/mine.py:none",))
    with pytest.raises(ConfigError, match=r"agent\.tools"):
        write_tool_schemas(msgspec.structs.replace(config, agent=agent), tmp_path)


def test_without_the_launcher_no_schema_is_known(tmp_path: Path) -> None:
    assert read_schemas(tmp_path) == {}
