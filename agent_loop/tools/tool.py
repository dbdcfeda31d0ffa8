"""Typed functions as tools: a schema for the model, calls with a deadline, and the answer of a tool or environment."""

import ast
import copy
import inspect
import logging
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self, get_type_hints

import msgspec

from rl_async.concurrency import DaemonCalls, Overdue, contained, within
from rl_async.errors import ConfigError, EnvironmentFailed
from rl_async.reward_loop.api import finite_number
from rl_async.transfer_queue.images import IMAGE_PARTS, read_parts
from rl_async.userload import encodable, raised_at

# A user's message as text, or chat messages; None says nothing.
Observation = str | Sequence[dict[str, Any]] | None


class Step(NamedTuple):
    """An answer to one turn, or to one tool call in it.

    ``reward`` is the turn's, and ``reason`` says why; both are recorded, and the reward counts in training beside the
    episode's. ``done`` ends the episode, and so does an environment with nothing to say. In a game of several roles,
    ``to`` names the one that is told the observation and speaks next.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    reason: str = ""
    to: str = ""


def checked(step: Step) -> Step:
    """Return the step of a user's environment or tool with Python's own numbers.

    Raises ValueError, which names the value, for a reward that is no finite number and a ``done`` that is no bool.
    """
    reward = None if step.reward is None else finite_number(step.reward)
    if step.reward is not None and reward is None:
        raise ValueError(f"returned {step.reward!r:.80}, not a reward that is a finite number")
    # NumPy's truth values are of another type.
    done: Any = step.done
    if getattr(done, "size", None) == 1:
        done = done.item()
    if not isinstance(done, bool):
        raise ValueError(f"returned done={step.done!r:.80}, not a bool")
    return step._replace(reward=reward, done=done, reason=encodable(str(step.reason)))


_ALLOWED = re.compile(r"[0-9+\-*() ]{1,24}")
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def evaluate(expression: str) -> int:
    """Evaluate ``expression``. Raises ValueError("bad expression") for anything but + - * ( ) and digits."""
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("bad expression")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError("bad expression") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case _:
            raise ValueError("bad expression")


log = logging.getLogger("rl_async.agent_loop")


class ToolResult(NamedTuple):
    """The result of a call: ``text`` for the model, and ``error``, empty if the call succeeded.

    ``reward``, ``reason`` and ``done`` are those of a tool that returns a Step. ``whole`` counts the characters of a
    result whose ``text`` is only the beginning, and is 0 for a complete one. ``text`` has a mark for each of the
    ``images`` (``transfer_queue/images.py``); a model that reads none gets ``plain``, or its episode fails without it.
    """

    text: str
    error: str = ""
    reward: float | None = None
    reason: str = ""
    done: bool = False
    whole: int = 0
    images: tuple[bytes, ...] = ()
    plain: str = ""


class CallableTool(Protocol):
    """A tool as an episode uses it: a function here, or one of a server elsewhere."""

    @property
    def name(self) -> str: ...
    @property
    def schema(self) -> dict[str, Any]: ...
    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Call the tool. A failure becomes a result with an error; an exception fails the sample."""
        ...


class Tool:
    """A function that the model may call. Arguments are checked against its parameters' types.

    ``quick`` functions run on the event loop, other plain functions in a thread; coroutine functions are awaited.
    Raises ConfigError for parameters without types.
    """

    def __init__(self, function: Callable[..., Any], *, name: str = "", quick: bool = False) -> None:
        self.name = name or function.__name__
        self.function = function
        self.quick = quick
        # Places in the code whose errors were logged.
        self._logged: set[str] = set()
        self._threads = DaemonCalls("agent.tool_timeout_s")
        self.arguments = _arguments_struct(self.name, function)
        self.schema = _schema(self.name, function, self.arguments)

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Call the function. Any failure becomes a result with an error, as a message to the model.

        Raises EnvironmentFailed for a Step that cannot be recorded: its reward is not the model's to mend.
        """
        try:
            accepted = msgspec.convert(arguments, self.arguments)
        except msgspec.ValidationError:
            return failed("bad arguments")
        named = {field: getattr(accepted, field) for field in self.arguments.__struct_fields__}
        try:
            value = await self._run(named, timeout_s)
            said = value.observation if isinstance(value, Step) else value
            text, images = ("", ()) if isinstance(value, Step) and said is None else _said(said)
            text = encodable(text)
        except Overdue:
            return failed("timeout")
        # A tool is the user's code and may raise anything; its errors go to the model and do not end the run.
        except Exception as error:
            self._log_once(error)
            return failed(encodable(str(error)) or type(error).__name__)
        if not isinstance(value, Step):
            return ToolResult(text, images=images)
        try:
            step = checked(value)
        except ValueError as error:
            raise EnvironmentFailed(f"tool {self.name} {error}") from None
        return ToolResult(text, reward=step.reward, reason=step.reason, done=step.done, images=images)

    def _log_once(self, error: Exception) -> None:
        """Log an error once per place that raised it, since a model may call a tool wrongly thousands of times."""
        place = raised_at(error)
        if place not in self._logged:
            self._logged.add(place)
            kind = type(error).__name__
            log.warning(
                "a call of tool %s raised %s in %s (each worker logs it once): %s", self.name, kind, place, error
            )

    async def _run(self, named: dict[str, Any], timeout_s: float) -> Any:
        if self.quick:
            return self.function(**named)
        if inspect.iscoroutinefunction(self.function):
            return await within(timeout_s, contained(self.function(**named)))
        return await self._threads.call(lambda: self.function(**named), timeout_s)

    @property
    def overdue(self) -> int:
        """How many calls still run past their deadline, in threads that nothing can end."""
        return self._threads.overdue

    def bound(self, function: Callable[..., Any]) -> Self:
        """Return the same tool with another function, such as a method of an environment."""
        other = copy.copy(self)
        other.function = function
        return other


def failed(reason: str, whole: int = 0) -> ToolResult:
    """Return the result of a call that failed, as a message to the model."""
    return ToolResult(f"error: {reason}", reason, whole=whole)


def marked_as_cut(beginning: str, whole: int) -> str:
    """Return the beginning of a result of ``whole`` characters, with a last line that tells the model so."""
    return f"{beginning}\n[cut: these are the first {len(beginning)} of {whole} characters]"


def _said(value: Any) -> tuple[str, tuple[bytes, ...]]:
    """Return a result as text with its images: bytes are an image, and content parts with images are text and these."""
    if isinstance(value, str):
        return value, ()
    parts = [{"type": "image", "image": value}] if isinstance(value, bytes) else value
    if isinstance(parts, list) and any(isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in parts):
        text, images = read_parts(parts)
        return text, tuple(images)
    return msgspec.json.encode(value).decode(), ()


def _arguments_struct(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Make a struct of the parameters, refusing unknown arguments. Raises ConfigError for parameters without types."""
    hints = get_type_hints(function)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        # A method gets its instance in each episode.
        if parameter.name == "self":
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
