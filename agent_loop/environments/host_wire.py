"""The messages between a worker and one of its environment hosts, over a socket pair that nobody else has."""

import asyncio
import struct
from typing import Any, Literal

import msgspec

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.tools.tool import Step
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, EnvironmentFailed, RlAsyncError
from rl_async.messages import Task

LENGTH = struct.Struct(">I")
# A message may have so many bytes.
MOST_BYTES = 1 << 26


class Setup(msgspec.Struct, tag=True):
    """The first message to a host."""

    config: RunConfig


class Prepare(msgspec.Struct, tag=True):
    """Prepare the environment ``instance`` before its task is known. The answer is empty."""

    call: int
    instance: int


class Begin(msgspec.Struct, tag=True):
    """Make the environment of a task, and reset it. Answered by Begun."""

    call: int
    instance: int
    task: Task


class Say(msgspec.Struct, tag=True):
    """Pass the policy's turn to the environment. Answered by Said."""

    call: int
    instance: int
    answer: str


class UseTool(msgspec.Struct, tag=True):
    """Call a tool of the environment, or of a role in it. Answered by a ToolResult."""

    call: int
    instance: int
    role: str
    name: str
    arguments: dict[str, Any]
    timeout_s: float


class Judge(msgspec.Struct, tag=True):
    """Ask for the episode's reward. Answered by a Score or nothing, by a game with a Score for each role."""

    call: int
    instance: int


class End(msgspec.Struct, tag=True):
    """Close an environment, or release the preparation for one. ``failure`` is the error that ended its episode.
    Answered by Ended, also for an unknown instance."""

    call: int
    instance: int
    failure: str = ""


class Cancel(msgspec.Struct, tag=True):
    """Wait no longer for the answer to another call. Not answered itself."""

    call: int


Request = Setup | Prepare | Begin | Say | UseTool | Judge | End | Cancel


class Described(msgspec.Struct):
    """A tool as the model sees it, and the role that has it."""

    role: str
    name: str
    schema: dict[str, Any]


class Begun(msgspec.Struct):
    """The environment's first messages, and its tools; for a game also its roles, and the role that they are ``to``."""

    messages: list[Message]
    tools: list[Described]
    roles: list[str] = []
    to: str = ""


class Said(msgspec.Struct):
    """The environment's answer to a turn."""

    step: Step
    messages: list[Message]


class Ended(msgspec.Struct):
    """An environment is gone. If ``stuck``, a call in the host, of any environment, goes on past its deadline.
    ``failure`` is the error of closing it."""

    stuck: bool
    failure: str = ""


class Welcome(msgspec.Struct, tag=True):
    """The first message of a host, which ``prepares`` environments if they can be prepared."""

    prepares: bool


class Answer(msgspec.Struct, tag=True):
    """The answer to a call."""

    call: int
    value: msgspec.Raw


class Failure(msgspec.Struct, tag=True):
    """The error of a call; of the host itself if ``call`` is 0."""

    call: int
    kind: Literal["ConfigError", "DataError", "EnvironmentFailed"]
    text: str


Reply = Welcome | Answer | Failure

_KINDS: dict[str, type[RlAsyncError]] = {kind.__name__: kind for kind in (ConfigError, DataError, EnvironmentFailed)}


def failure_of(call: int, error: RlAsyncError) -> Failure:
    """Encode an error. Kinds that are unknown here become an EnvironmentFailed."""
    kind = type(error).__name__
    if kind in _KINDS:
        return Failure(call, kind, str(error))  # type: ignore[arg-type]
    return Failure(call, "EnvironmentFailed", f"{kind}: {error}")


def error_of(failure: Failure) -> RlAsyncError:
    """Decode an error."""
    return _KINDS[failure.kind](failure.text)


def frame(message: Request | Reply) -> bytes:
    """Encode a message. Raises ValueError if it is too long, and msgspec's errors for values that it cannot encode."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MOST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than {MOST_BYTES}")
    return LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read an encoded message. Raises IncompleteReadError or ConnectionError at the end, ValueError for a long one."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MOST_BYTES:
        raise ValueError(f"a message of {length} bytes is longer than {MOST_BYTES}")
    return await reader.readexactly(length)
