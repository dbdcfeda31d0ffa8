"""The built-in tools by name, and users' own."""

import functools
from collections.abc import Mapping, Sequence

from rl_async.agent_loop.tools.arithmetic import evaluate
from rl_async.agent_loop.tools.code import BASH, PYTHON
from rl_async.agent_loop.tools.tool import CallableTool, Tool
from rl_async.configs.derived.code import code_problem, listed_code
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Task
from rl_async.userload import is_user_reference, load_user_object


def calculator(expression: str) -> str:
    """Evaluate whole-number arithmetic with + - * and parentheses."""
    return str(evaluate(expression))


CALCULATOR = Tool(calculator, quick=True)
TOOLS = {"calculator": CALCULATOR, "python": PYTHON, "bash": BASH}


NO_SERVERS: Mapping[str, CallableTool] = {}


def task_tools(
    config: RunConfig, task: Task, of_servers: Mapping[str, CallableTool] = NO_SERVERS
) -> list[CallableTool]:
    """Return the tools of a task: those that it names, or all of the config's. ``of_servers``: those of `agent.mcp`.

    Raises ConfigError for one that does not exist, and DataError for a task that names code not listed in the config.
    """
    require_listed(config, task)
    if task.tools is None:
        return [*map(get_tool, config.agent.tools), *of_servers.values()]
    return [of_servers.get(name) or get_tool(name) for name in task.tools]


def distinct(tools: Sequence[CallableTool], of_servers: Mapping[str, CallableTool]) -> Sequence[CallableTool]:
    """Return an environment's tools. Raises ConfigError if one has the name of a server's."""
    if twice := next((tool.name for tool in tools if tool.name in of_servers), None):
        raise ConfigError(
            f"agent.environment: its tool {twice!r} is also one of agent.mcp; leave it out there by allow"
        )
    return tools


def require_listed(config: RunConfig, task: Task) -> None:
    """Raise DataError if the task names code that the config does not list, before any of it is loaded."""
    if problem := code_problem(task, listed_code(config)):
        raise DataError(f"task {task.task_id}: {problem}")


@functools.cache
def get_tool(name: str) -> Tool:
    """Return a built-in tool or the user's function ``path.py:name``. Raises ConfigError if there is none."""
    if is_user_reference(name):
        function = load_user_object(name, "agent.tools")
        if isinstance(function, Tool):
            return function
        if not callable(function):
            raise ConfigError(f"agent.tools: {name} is not a function")
        return Tool(function)
    if name not in TOOLS:
        raise ConfigError(f"agent.tools: no tool {name!r}; built in: {', '.join(TOOLS)}; or path.py:function")
    return TOOLS[name]
