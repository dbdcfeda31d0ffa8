"""A server's command line, environment and log."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rl_async.agent_loop.tools.mcp_toolbox import SAID, McpServer, forget_variables
from rl_async.configs.schema.mcp import McpServerConfig
from rl_async.errors import ConfigError


def server(tmp_path: Path, **config: Any) -> McpServer:
    return McpServer(McpServerConfig(**config), 2, tmp_path / "mcp.log")


def test_a_command_is_a_list_or_a_text_that_is_split(tmp_path: Path) -> None:
    assert server(tmp_path, command=(sys.executable, "-m", "x y")).argv == [sys.executable, "-m", "x y"]
    assert server(tmp_path, command=f"{sys.executable} -m 'x y; z'").argv == [sys.executable, "-m", "x y; z"]


def test_a_program_that_does_not_exist_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp\[2\]\.command.*'no-such-server'"):
        server(tmp_path, command="no-such-server --x")


def test_the_environment_has_what_is_named_and_no_keys_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "ours")
    monkeypatch.setenv("SEARCH_KEY", "theirs")
    config = McpServerConfig(command=sys.executable, env={"MODE": "test"}, env_from=("SEARCH_KEY",))
    environment = McpServer(config, 0, tmp_path / "log").environment
    assert environment["MODE"] == "test" and environment["SEARCH_KEY"] == "theirs"
    assert "JUDGE_KEY" not in environment and "PATH" in environment
    forget_variables([config])
    with pytest.raises(ConfigError, match=r"agent\.mcp\[2\]\.env_from.*SEARCH_KEY"):
        server(tmp_path, command=sys.executable, env_from=("SEARCH_KEY",))


def test_headers_come_from_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "Bearer x")
    made = server(tmp_path, url="http://h/mcp", headers_from={"Authorization": "TOKEN"})
    assert made.headers == {"Authorization": "Bearer x"}


def test_the_last_line_that_a_server_wrote_is_printable_and_short(tmp_path: Path) -> None:
    made = server(tmp_path, command=sys.executable)
    assert made.said() == ""
    made.log_path.write_text("first\n\x1b[31m" + "y" * 2 * SAID + "\n\n")
    assert "first" not in made.said() and "\x1b" not in made.said() and len(made.said()) < 2 * SAID
