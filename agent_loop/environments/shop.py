"""The environment of the preset `shop`."""

from collections.abc import Sequence

from rl_async.agent_loop.environments.services import Services
from rl_async.agent_loop.tools.registry import CALCULATOR
from rl_async.agent_loop.tools.tool import Tool
from rl_async.errors import DataError
from rl_async.messages import Task

NO_SUCH_ITEM = "no such item"  # the demonstrations show the model this error


class Shop:
    """One item with a hidden price, which the tool ``lookup`` returns and ``calculator`` computes with."""

    def __init__(self, task: Task, services: Services) -> None:
        try:
            self._item, self._price = str(task.extra["item"]), str(task.extra["price"])
        except KeyError as error:
            raise DataError(f"task {task.task_id}: environment shop needs extra_info.{error.args[0]}") from error

    def tools(self) -> Sequence[Tool]:
        return (_LOOKUP.bound(self.lookup), CALCULATOR)

    def lookup(self, item: str) -> str:
        """The price of an item."""
        if item != self._item:
            raise ValueError(NO_SUCH_ITEM)
        return self._price


_LOOKUP = Tool(Shop.lookup, name="lookup", quick=True)
