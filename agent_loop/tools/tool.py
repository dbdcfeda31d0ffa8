"""Typed functions as tools: a schema for the model, and calls with a deadline."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Self, get_type_hints

import msgspec

from rl_async.errors import ConfigError
from rl_async.threads import in_daemon_thread

log = logging.getLogger("rl_async.agent_loop")

MOST_OVERDUE = 64  # threads of one tool that go on past their deadline, which nothing can end


class ToolResult(NamedTuple):
    """The result of a call: ``text`` for the model, and ``error``, empty if the call succeeded."""

    text: str
    error: str = ""


class Tool:
    """A function that the model may call. Arguments are checked against its parameters' types.

    ``quick`` functions run on the event loop, other plain functions in a thread; coroutine functions are awaited.
    Raises ConfigError for parameters without types.
    """

    def __init__(self, function: Callable[..., Any], *, name: str = "", quick: bool = False) -> None:
        self.name = name or function.__name__
        self.function = function
        self.quick = quick
        self._logged: set[str] = set()  # places in the code whose errors were logged
        self._overdue: set[Future[Any]] = set()  # calls that nobody waits for any more
        self.arguments = _arguments_struct(self.name, function)
        self.schema = _schema(self.name, function, self.arguments)

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Call the function. Any failure becomes a result with an error, as a message to the model."""
        try:
            accepted = msgspec.convert(arguments, self.arguments)
        except msgspec.ValidationError:
            return _failed("bad arguments")
        named = {field: getattr(accepted, field) for field in self.arguments.__struct_fields__}
        try:
            return ToolResult(_text(await self._run(named, timeout_s)))
        except TimeoutError:
            return _failed("timeout")
        # A tool is the user's code and may raise anything; its errors go to the model and do not end the run.
        except Exception as error:
            self._log_once(error)
            return _failed(str(error) or type(error).__name__)

    def _log_once(self, error: Exception) -> None:
        """Log an error once per place that raised it, since a model may call a tool wrongly thousands of times."""
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        place = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else "?"
        if place not in self._logged:
            self._logged.add(place)
            kind = type(error).__name__
            log.warning("tool %s raised %s in %s (logged once): %s", self.name, kind, place, error)

    async def _run(self, named: dict[str, Any], timeout_s: float) -> Any:
        if self.quick:
            return self.function(**named)
        async with asyncio.timeout(timeout_s):
            if inspect.iscoroutinefunction(self.function):
                return await self.function(**named)
            return await self._in_thread(named)

    async def _in_thread(self, named: dict[str, Any]) -> Any:
        """Call in a thread of its own, so that a call that never returns blocks neither others nor the process's exit.

        Raises RuntimeError once too many calls have not returned since their deadlines.
        """
        if len(self._overdue) >= MOST_OVERDUE:
            raise RuntimeError(f"{MOST_OVERDUE} earlier calls still run past their deadline (agent.tool_timeout_s)")
        work = in_daemon_thread(lambda: self.function(**named), "tool")
        try:
            return await asyncio.wrap_future(work)
        finally:
            if not work.done():
                self._overdue.add(work)
                work.add_done_callback(self._overdue.discard)

    def bound(self, function: Callable[..., Any]) -> Self:
        """Return the same tool with another function, such as a method of an environment."""
        other = copy.copy(self)
        other.function = function
        return other


def _failed(reason: str) -> ToolResult:
    return ToolResult(f"error: {reason}", reason)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _arguments_struct(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Make a struct of the parameters, refusing unknown arguments. Raises ConfigError for parameters without types."""
    hints = get_type_hints(function)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":  # a method, to be bound for each episode
            continue
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"agent.tools: {name}: parameter {parameter.name!r} needs a type annotation")
        if parameter.default is inspect.Parameter.empty:
            fields.append((parameter.name, hints[parameter.name]))
        else:
            fields.append((parameter.name, hints[parameter.name], parameter.default))
    return msgspec.defstruct(f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)


def _schema(name: str, function: Callable[..., Any], arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the tool's JSON schema in the form that chat templates take."""
    (reference,), components = msgspec.json.schema_components([arguments])
    parameters = components[reference["$ref"].rpartition("/")[2]]
    parameters = {key: parameters[key] for key in ("type", "properties", "required")}
    description = inspect.getdoc(function) or ""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
