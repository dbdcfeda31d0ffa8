"""The built-in tools by name, and users' own."""

import functools

from rl_async.agent_loop.tools.arithmetic import evaluate
from rl_async.agent_loop.tools.tool import Tool
from rl_async.errors import ConfigError
from rl_async.userload import is_user_reference, load_user_object


def calculator(expression: str) -> str:
    """Evaluate whole-number arithmetic with + - * and parentheses."""
    return str(evaluate(expression))


CALCULATOR = Tool(calculator, quick=True)
TOOLS = {"calculator": CALCULATOR}


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
