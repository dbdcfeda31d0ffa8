"""Writes the schemas of a run's tools, so that its queue can count the tokens of prompts without loading user code.

User code is loaded in a separate process: ``python -m rl_async.launcher.plan.tool_schemas``.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE
from rl_async.launcher.plan.user_code import LOAD_S, run_apart
from rl_async.transfer_queue.chat_messages import TOOLS_FILE
from rl_async.userload import is_user_reference


def write_tool_schemas(config: RunConfig, folder: Path) -> None:
    """Write the schemas of the config's tools, and of the built-in ones, which tasks may name, into a run's folder.

    With a gateway the file lists none, since programs offer their own tools. Raises ConfigError if a tool cannot be
    loaded.
    """
    from rl_async.agent_loop.tools.tool_registry import TOOLS

    names = [] if config.agent.gateway is not None else [*dict.fromkeys([*TOOLS, *config.agent.tools])]
    if any(map(is_user_reference, names)):
        printed = run_apart(
            "launcher.plan.tool_schemas", json.dumps(names), what="agent.tools: loading them", limit_s=LOAD_S
        )
        # The user's code may have printed something before.
        try:
            schemas = msgspec.json.decode(printed.rstrip().rpartition("\n")[2], type=dict[str, dict[str, Any]])
        except UNDECODABLE as error:
            raise ConfigError(f"agent.tools: their code prints something as it ends: {printed[-80:]!r}") from error
    else:
        schemas = schemas_of(names)
    (folder / TOOLS_FILE).write_text(json.dumps(schemas))


def schemas_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schemas of tools by name. Imports their code; raises ConfigError if it cannot be loaded."""
    from rl_async.agent_loop.tools.tool_registry import get_tool

    return {name: get_tool(name).schema for name in names}


def main() -> int:
    """Print the schemas of the tools that the argument lists, as the last line of standard output."""
    print(json.dumps(schemas_of(json.loads(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
