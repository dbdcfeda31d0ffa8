"""The agent programs of the trial: what is installed, how one is started, and what the tiny model says to it.

To add one, add a line; a library also gets a function in ``players/libraries.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.agent_programs.puppet import Lines

PLAYERS = Path(__file__).with_name("players")
PYTHON, BIN = "{client}/bin/python", "{client}/node_modules/.bin"
PROMPT = "Take a digit, show it with a tool, and then answer with it."
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True)
class Client:
    """An agent program. ``{client}`` in its command is the folder in which ``packages`` are installed.

    The other placeholders, and the variables that are set, are those of `rl-async play`.
    """

    packages: tuple[str, ...]
    command: tuple[str, ...]
    lines: Lines = field(default_factory=Lines)
    environment: Mapping[str, str] = field(default_factory=dict)
    registry: Literal["pip", "npm"] = "pip"
    folder: str = ""  # shared with clients of the same packages; empty: its own

    @property
    def version(self) -> str:
        """The version of the first package."""
        return self.packages[0].replace("==", "@").rpartition("@")[2]


def player(library: str) -> tuple[str, ...]:
    return (PYTHON, str(PLAYERS / "libraries.py"), library, "{prompt}")


def shell(tool: str, argument: str, **more: str) -> Lines:
    """Return the lines for a program that runs commands."""
    rest = "".join(f', "{name}": "{value}"' for name, value in more.items())
    return Lines(tool, f'{{"{argument}": "echo N > answer"{rest}}}', "I took N.")


OPENAI = ("openai==3.54.0",)
CODEX_PROVIDER = '{name="rl",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}'
OPENCODE_CONFIG = (
    '{"model": "rl/policy", "provider": {"rl": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": '
    '"{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}, "models": {"policy": {}}}}}'
)

CLIENTS: dict[str, Client] = {
    "openai-chat": Client(OPENAI, player("openai-chat"), folder="openai"),
    "openai-streaming": Client(OPENAI, player("openai-streaming"), folder="openai"),
    "openai-responses": Client(OPENAI, player("openai-responses"), folder="openai"),
    "anthropic": Client(("anthropic==2.12.0",), player("anthropic"), Lines(thinks=True)),
    "openai-agents": Client(("openai-agents==0.24.0",), player("openai-agents")),
    "langgraph": Client(("langgraph==1.2.22", "langchain==1.4.7", "langchain-openai==1.7.3"), player("langgraph")),
    "smolagents": Client(
        ("smolagents[openai]==1.26.0",),
        player("smolagents"),
        Lines(last='{"answer": "N"}', last_tool="final_answer", shown="Observation:\nN"),
    ),
    "pydantic-ai": Client(
        ("pydantic-ai-slim[openai]==2.68.0",),
        player("pydantic-ai"),
        Lines(last='{"digit": N}', last_tool="final_result"),
    ),
    "litellm": Client(("litellm[mcp]==1.106.2",), player("litellm")),
    "ai-sdk": Client(
        ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7"),
        ("node", str(PLAYERS / "ai_sdk.mjs"), "{client}", "{prompt}"),
        registry="npm",
    ),
    "mini-swe-agent": Client(
        ("mini-swe-agent==2.4.6", "litellm[mcp]==1.106.2"),
        ("{client}/bin/mini", "-m", "openai/policy", "-t", "{prompt}", "-y", "--exit-immediately"),
        Lines("bash", '{"command": "echo N > answer"}', f'{{"command": "{DONE}"}}', last_tool="bash"),
        environment={"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true"},
    ),
    "claude-code": Client(
        ("@anthropic-ai/claude-code@2.1.197",),
        (f"{BIN}/claude", "-p", "{prompt}", "--dangerously-skip-permissions"),
        shell("Bash", "command", description="Write it"),
        environment={"IS_SANDBOX": "1"},
        registry="npm",
    ),
    "codex": Client(
        ("@openai/codex@0.169.0",),
        (
            *(f"{BIN}/codex", "exec", "--skip-git-repo-check", "-c", 'model="policy"', "-c", 'model_provider="rl"'),
            *("-c", f"model_providers.rl={CODEX_PROVIDER}", "{prompt}"),
        ),
        Lines("exec_command", '{"cmd": "echo N"}', "I took N."),  # its sandbox lets commands read only
        registry="npm",
    ),
    "qwen-code": Client(
        ("@qwen-code/qwen-code@0.24.4",),
        (f"{BIN}/qwen", "-p", "{prompt}", "--yolo", "--auth-type", "openai", "--model", "policy"),
        shell("run_shell_command", "command", description="Write it"),
        registry="npm",
    ),
    "opencode": Client(
        ("opencode-ai@1.18.33",),
        (f"{BIN}/opencode", "run", "{prompt}"),
        shell("bash", "command", description="Write it"),
        environment={"OPENCODE_CONFIG_CONTENT": OPENCODE_CONFIG},
        registry="npm",
    ),
}


def install_commands(client: Client, folder: Path) -> list[list[str]]:
    """Return the commands that install a client in ``folder``."""
    if client.registry == "npm":
        return [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages]]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return [["python3", "-m", "venv", str(folder)], [*pip, *client.packages]]
