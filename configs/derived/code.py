"""Which user code a task may name: tasks come from data sets and from clients of the queue, which must not run code."""

import msgspec

from rl_async.configs.schema.run import RunConfig
from rl_async.messages import Task
from rl_async.userload import is_user_reference


class ListedCode(msgspec.Struct, frozen=True):
    """The user code that the config's section `agent` names."""

    loops: tuple[str, ...]
    tools: tuple[str, ...]


def listed_code(config: RunConfig) -> ListedCode | None:
    """Return the user code that tasks may name; None: any (``data.trust_code``)."""
    if config.data.trust_code:
        return None
    return ListedCode((config.agent.loop,), config.agent.tools)


def code_problem(task: Task, listed: ListedCode | None) -> str | None:
    """Name the task's first reference to code that the config does not list, with the fix; None if there is none.

    Names of built-in loops and tools load nothing, so they always pass.
    """
    if listed is None:
        return None
    if is_user_reference(task.agent) and task.agent not in listed.loops:
        return _problem("agent_name", task.agent, "agent.loop")
    for name in task.tools or ():
        if is_user_reference(name) and name not in listed.tools:
            return _problem("tools", name, "agent.tools")
    return None


def _problem(column: str, name: str, key: str) -> str:
    return (
        f"{column} names code that the config does not list: {name!r:.200}; name it in {key}, or set "
        "data.trust_code=true if whoever writes tasks may run code as you"
    )
