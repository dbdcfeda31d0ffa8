"""Tools of MCP servers (Model Context Protocol): `agent.mcp` in, tools as the episode runner knows them out.

A worker enters ``McpToolbox``, which asks every server for its tools before the first lease; the episode runner takes
each episode's tools from it. Calls go through ``McpSessions``, which opens a session when it is needed and again after
a server was lost. Everything that a server sends is text from outside: descriptions are checked and named, results
become text of bounded length. The SDK is imported by `mcp_connection.py` alone, and only if the config has servers.
"""

import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TextIO

import msgspec

from rl_async.agent_loop.tools.tool import CallableTool, ToolResult, failed
from rl_async.concurrency import Overdue, gather_or_cancel, time_limit, to_the_end, within
from rl_async.configs.derived import PASSED, argv_of, secret_variables
from rl_async.configs.schema.rollout import McpServerConfig
from rl_async.errors import ConfigError, McpServerLost
from rl_async.transfer_queue.images import MARK, read_image

log = logging.getLogger("rl_async.agent_loop")

# --- servers --------------------------------------------------------------------------------------------------------

# A server's last line is searched for in so many bytes at the end of its log, and quoted up to so many characters.
SAID_BYTES = 4096
SAID = 300
INSTALL = "python -m pip install 'rl-async[mcp]'"


class McpServer:
    """One server with all that is needed to begin sessions. Its standard error goes to ``log_path``.

    Raises ConfigError, naming the key, for a command or variable that does not exist here, or without the SDK.
    """

    def __init__(self, config: McpServerConfig, place: int, log_path: Path) -> None:
        self.config, self.log_path = config, log_path
        self.key = f"agent.mcp[{place}]"
        self.name = config.name or f"server {place}"
        argv = argv_of(config)
        self.label = f"{self.key} ({config.name or config.url.partition('?')[0] or shlex.join(argv)})"
        self.environment = {
            **{name: os.environ[name] for name in PASSED if name in os.environ},
            **config.env,
            **{name: self._variable(name, "env_from") for name in config.env_from},
        }
        self.headers = {name: self._variable(at, "headers_from") for name, at in config.headers_from.items()}
        self.argv: list[str] = []
        if not config.url:
            path = self.environment.get("PATH", os.defpath)
            if (program := shutil.which(argv[0], path=path)) is None:
                raise ConfigError(f"{self.key}.command: there is no program {argv[0]!r} on PATH")
            self.argv = [program, *argv[1:]]

    def _variable(self, name: str, key: str) -> str:
        if not (value := os.environ.get(name)):
            raise ConfigError(f"{self.key}.{key}: the environment has no {name}; export it first")
        return value

    @contextlib.contextmanager
    def log(self) -> Iterator[TextIO]:
        """Open the file that gets the server's standard error."""
        with self.log_path.open("a") as file:
            yield file

    def said(self) -> str:
        """Return, as the end of a message, the last line that the server wrote to its standard error."""
        if self.config.url or not self.log_path.is_file():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SAID_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
        line = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        printable = "".join(c if c.isprintable() else "?" for c in line[:SAID])
        return f"; it said last: {printable}"


def mcp_servers(configs: Sequence[McpServerConfig], log_folder: Path, owner: str) -> list[McpServer]:
    """Return the servers of a config, whose logs are called after ``owner``.

    Raises ConfigError for mistakes that show without starting one.
    """
    if configs and find_spec("mcp") is None:
        raise ConfigError(f"agent.mcp: the SDK for MCP servers is not installed; run `{INSTALL}`")
    return [McpServer(config, place, log_folder / f"mcp-{place}-{owner}.log") for place, config in enumerate(configs)]


def forget_variables(configs: Sequence[McpServerConfig]) -> None:
    """Remove the servers' secrets from the environment, so that processes of tools and scorers do not inherit them."""
    for name in secret_variables(configs):
        os.environ.pop(name, None)


# --- names and schemas of tools -------------------------------------------------------------------------------------

# Limits on a server's tools, since all their schemas stand in every prompt. A schema's size includes its description.
MOST_TOOLS = 64
SCHEMA_BYTES = 16 << 10
NAME_CHARACTERS = 64
_OTHER = re.compile(r"[^A-Za-z0-9_-]")
# The keys of a schema that are kept; $defs was called definitions until draft 7.
_KEPT = ("type", "properties", "required", "$defs", "definitions", "additionalProperties", "anyOf", "oneOf", "allOf")


class Listed(NamedTuple):
    """A tool as its server lists it."""

    name: str
    description: str
    parameters: dict[str, Any]


class Offer(NamedTuple):
    """A tool of the server at ``place`` as the model gets it: ``name`` is the server's, the schema may have another."""

    place: int
    name: str
    schema: dict[str, Any]


def chosen(listed: Sequence[Listed], allow: Sequence[str], key: str) -> list[Listed]:
    """Return the tools that ``allow`` names, in its order, or all. Raises ConfigError for names that do not exist."""
    by_name = {tool.name: tool for tool in listed}
    if not listed:
        raise ConfigError(f"{key}: the server has no tools")
    if unknown := [name for name in allow if name not in by_name]:
        raise ConfigError(f"{key}.allow: there is no tool {unknown[0]!r:.100}; the server has {_names(listed)}")
    found = [by_name[name] for name in allow] if allow else list(by_name.values())
    if len(found) > MOST_TOOLS:
        raise ConfigError(
            f"{key}: the server has {len(found)} tools, more than {MOST_TOOLS} that may stand in every prompt; name "
            f"some of them in allow: {_names(listed)}"
        )
    return found


def offers(servers: Sequence[tuple[str, str, Sequence[Listed]]], taken: Sequence[str]) -> list[Offer]:
    """Name the tools of all servers, each given with its key, its name and its tools, apart from names ``taken``.

    Tools of one name get their servers' names as a prefix. Raises ConfigError, naming the keys, for tools that cannot
    be told apart so, and for schemas that no chat template could print.
    """
    plain = [
        (place, tool, _OTHER.sub("_", tool.name)[:NAME_CHARACTERS] or "_")
        for place, (_, _, tools) in enumerate(servers)
        for tool in tools
    ]
    count = Counter(taken) + Counter(name for _, _, name in plain)
    made, users = list[Offer](), dict.fromkeys(taken, "agent.tools")
    for place, tool, name in plain:
        key, prefix, _ = servers[place]
        if count[name] > 1 and prefix:
            name = f"{prefix}_{name}"[:NAME_CHARACTERS]
        if name in users:
            raise ConfigError(
                f"{key}: the name of its tool {tool.name!r:.100} is also one of {users[name]}; give the server a name, "
                "which then prefixes it, or leave a tool out with allow"
            )
        users[name] = key
        made.append(Offer(place, tool.name, _schema(tool, name, key)))
    return made


def _names(listed: Sequence[Listed]) -> str:
    names = ", ".join(f"{tool.name!r:.60}" for tool in listed[:MOST_TOOLS])
    return names if len(listed) <= MOST_TOOLS else f"{names} and {len(listed) - MOST_TOOLS} more"


def _schema(tool: Listed, name: str, key: str) -> dict[str, Any]:
    """Return the schema in the form that chat templates take. Raises ConfigError for one that is malformed or huge."""
    given = tool.parameters
    properties, required = given.get("properties", {}), given.get("required", [])
    problem = ""
    if given.get("type") != "object":
        problem = "its type is not object"
    elif not isinstance(properties, dict) or not all(isinstance(value, dict) for value in properties.values()):
        problem = "its properties are not schemas"
    elif not isinstance(required, list) or not all(isinstance(value, str) for value in required):
        problem = "its required is not a list of names"
    if problem:
        raise ConfigError(
            f"{key}: the schema of tool {tool.name!r:.100} is malformed: {problem}; leave it out with allow"
        )
    parameters = {part: given[part] for part in _KEPT if part in given}
    parameters |= {"properties": properties, "required": required}
    function = {"name": name, "description": tool.description, "parameters": parameters}
    if (size := len(msgspec.json.encode(function))) > SCHEMA_BYTES:
        raise ConfigError(
            f"{key}: the schema of tool {tool.name!r:.100} has {size} bytes, more than {SCHEMA_BYTES}, too many "
            "for every prompt; leave it out by allow"
        )
    return {"type": "function", "function": function}


# --- results --------------------------------------------------------------------------------------------------------

# A result is cut to so many characters before agent.tool_response_tokens is applied.
MOST_CHARACTERS = 1 << 18


def as_result(answer: Mapping[str, Any]) -> ToolResult:
    """Convert the JSON result of the protocol's `tools/call` to a ToolResult; refused images are described."""
    content = answer.get("content") or ()
    texts, images = list(map(_text, content)), dict[int, bytes]()
    for place, block in enumerate(content):
        if block.get("type") == "image":
            try:
                images[place] = read_image({"data": block.get("data")})
            except ValueError as error:
                texts[place] = f"{texts[place][:-1]}: {error}]"
    structured = answer.get("structuredContent")
    if structured is not None and not any(block.get("type") == "text" for block in content):
        texts.insert(0, msgspec.json.encode(structured).decode())
        images = {place + 1: image for place, image in images.items()}
    plain = "\n".join(texts)
    whole = len(plain) if len(plain) > MOST_CHARACTERS else 0
    plain = plain[:MOST_CHARACTERS]
    if answer.get("isError"):
        return failed(plain or "the tool failed", whole)
    if not images:
        return ToolResult(plain, whole=whole)
    marked = (MARK if place in images else text.replace(MARK, "\ufffd") for place, text in enumerate(texts))
    text = "\n".join(marked)
    whole = len(text) if len(text) > MOST_CHARACTERS else 0
    return ToolResult(text[:MOST_CHARACTERS], whole=whole, images=tuple(images.values()), plain=plain)


def _text(block: Mapping[str, Any]) -> str:
    """Return a block's text, or a description in place of other content."""
    match block.get("type"):
        case "text":
            return str(block["text"])
        case "image" | "audio" as kind:
            return f"[{kind}: {block.get('mimeType', '')}, {_bytes(block.get('data'))}, which cannot be shown as text]"
        case "resource_link":
            about = [block.get(key) for key in ("name", "description", "mimeType")]
            return f"[resource {block.get('uri', '')}: {', '.join(str(part) for part in about if part)}]"
        case "resource":
            resource = block.get("resource") or {}
            if "text" in resource:
                return str(resource["text"])
            kind, size = resource.get("mimeType") or "binary", _bytes(resource.get("blob"))
            return f"[resource {resource.get('uri', '')}: {kind}, {size}, which cannot be shown as text]"
        case kind:
            return f"[{kind}, which cannot be shown as text]"


def _bytes(data: object) -> str:
    """Return the size of base64 data."""
    return f"{len(data) * 3 // 4} bytes" if isinstance(data, str) else "no data"


# --- sessions and the toolbox ---------------------------------------------------------------------------------------

# A sample fails when so many sessions in a row were lost without a successful call.
MOST_LOST = 3
# A session counts as lost when so many calls in a row timed out.
MOST_TIMEOUTS = 3
# A session is opened in so many attempts, with pauses that double each time.
OPENINGS = 3
FIRST_PAUSE_S = 0.5


class ToolFailed(Exception):
    """The server refused a call or answered it wrongly; the message says how."""


class Connection(Protocol):
    """One session with a server; making one begins it."""

    @property
    def lost(self) -> bool:
        """Whether no call can succeed any more."""
        ...

    async def opened(self) -> None:
        """Wait until the session has begun. Raises McpServerLost if it does not."""
        ...

    async def tools(self) -> list[Listed]:
        """Ask for the server's tools. Raises McpServerLost, or ConfigError for an answer that cannot be used."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Call a tool; return the result as the protocol writes it. Raises ToolFailed; see ``lost`` after it."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the session and the server's processes have ended."""
        ...

    def close(self) -> None:
        """End the session soon."""
        ...

    async def closed(self) -> None:
        """Wait until ``ended``."""
        ...


Connect = Callable[[McpServer], Connection]


class McpSessions:
    """One session at a time. A call that loses it gets an error as its result; the next call begins another session.

    Between openings that fail it pauses, first for ``first_pause_s`` and then twice as long each time.
    """

    def __init__(
        self, server: McpServer, connect: Connect, turns: asyncio.Semaphore, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        self._server, self._connect, self._turns = server, connect, turns
        self._first_pause_s = first_pause_s
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._lost = self._timeouts = 0
        # When a call was last answered, or counted as one without an answer, on the loop's clock.
        self._heard = 0.0
        self._closed = False

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """Call a tool; a failure becomes a result with an error, as a message to the model.

        Raises McpServerLost if no session can be had, or the last MOST_LOST had no successful call.
        """
        connection = await self.connection()
        began = asyncio.get_running_loop().time()
        try:
            answer = await within(timeout_s, connection.call(name, arguments))
        except Overdue:
            # Calls that were made at once count once, and not at all if one was answered meanwhile: the server works.
            if began >= self._heard:
                self._heard = asyncio.get_running_loop().time()
                self._timeouts += 1
            if self._timeouts >= MOST_TIMEOUTS:
                self._lose(connection, f"{self._timeouts} calls in a row had no answer within {timeout_s:g} s")
            return failed("timeout")
        except ToolFailed as error:
            if connection.lost:
                self._lose(connection, str(error))
                return failed(f"the tool's server was lost and is started again: {error}")
            return failed(str(error) or "the tool failed")
        self._lost = self._timeouts = 0
        self._heard = asyncio.get_running_loop().time()
        return as_result(answer)

    async def connection(self) -> Connection:
        """Return a session that has begun, shared by all callers. Raises McpServerLost if none can be opened."""
        if self._connection is not None:
            if not self._connection.lost:
                return self._connection
            # It was lost while nobody called.
            self._connection.close()
            self._connection = None
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=f"open {self._server.label}")
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def _open(self) -> Connection:
        """Begin a session, trying again a few times. Waits for a turn, since many starts at once are slow ones."""
        for left in reversed(range(OPENINGS)):
            async with self._turns:
                connection = self._connect(self._server)
                try:
                    await connection.opened()
                    return connection
                except McpServerLost:
                    if not left:
                        raise
            await asyncio.sleep(self._first_pause_s * 2 ** (OPENINGS - 1 - left))
        raise AssertionError("unreachable")

    def _opened(self, task: "asyncio.Task[Connection]") -> None:
        self._opening = None
        if not task.cancelled() and task.exception() is None:
            self._connection, self._timeouts = task.result(), 0
            if self._closed:
                self.close()

    def _lose(self, connection: Connection, reason: str) -> None:
        """Count the loss of a session once, however many calls it had. Raises McpServerLost for one too many."""
        if connection is not self._connection:
            return
        connection.close()
        self._connection = None
        self._lost += 1
        log.warning("%s: a session was lost (%d in a row): %s", self._server.label, self._lost, reason)
        if self._lost >= MOST_LOST:
            raise McpServerLost(
                f"{self._server.label}: its last {self._lost} sessions ended without a successful call: "
                f"{reason}{self._server.said()}"
            )

    def close(self) -> None:
        """End the session soon. Callers that still wait for one get a CancelledError."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# So many sessions of one server begin together.
STARTS_AT_ONCE = 8


class McpTool:
    """A tool of a server, with the sessions of one episode or of the worker."""

    def __init__(self, offer: Offer, sessions: McpSessions) -> None:
        self.name: str = offer.schema["function"]["name"]
        self.schema = offer.schema
        self._at_server, self._sessions = offer.name, sessions

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Call the tool at its server, which checks the arguments. Raises McpServerLost."""
        return await self._sessions.call(self._at_server, arguments, timeout_s)


class McpToolbox:
    """The tools of all servers, named apart from ``taken``. For ``first_pause_s`` see ``McpSessions``.

    Entering raises McpServerLost for a server that cannot be started or asked, and ConfigError, naming the key, for
    tools that cannot be used.
    """

    def __init__(
        self,
        servers: Sequence[McpServer],
        connect: Connect,
        taken: Sequence[str] = (),
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._connect_to, self._taken, self._first_pause_s = connect, taken, first_pause_s
        self._connections = list[Connection]()
        self._servers = [(server, asyncio.Semaphore(STARTS_AT_ONCE)) for server in servers]
        self._shared = [self._sessions(server, turns) for server, turns in self._servers]
        self._offers: list[Offer] = []

    async def __aenter__(self) -> Self:
        try:
            found = await gather_or_cancel(*(self._listed(place) for place in range(len(self._servers))))
            named = [(s.key, s.config.name, tools) for (s, _), tools in zip(self._servers, found, strict=True)]
            self._offers = offers(named, self._taken)
        except BaseException:
            await self._close()
            raise
        for (server, _), sessions in zip(self._servers, self._shared, strict=True):
            if server.config.scope == "episode":
                sessions.close()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def offered(self) -> list[tuple[str, str]]:
        """The key of its server and the name of each tool."""
        return [(self._servers[offer.place][0].key, offer.schema["function"]["name"]) for offer in self._offers]

    @contextlib.contextmanager
    def episode(self) -> Iterator[Mapping[str, CallableTool]]:
        """Give an episode its tools by name, with sessions of its own where the scope is ``episode``.

        They begin with the first call and end, soon, with the block.
        """
        sessions = [
            self._sessions(server, turns) if server.config.scope == "episode" else shared
            for (server, turns), shared in zip(self._servers, self._shared, strict=True)
        ]
        try:
            tools = [McpTool(offer, sessions[offer.place]) for offer in self._offers]
            yield {tool.name: tool for tool in tools}
        finally:
            for own, shared in zip(sessions, self._shared, strict=True):
                if own is not shared:
                    own.close()

    async def _listed(self, place: int) -> list[Listed]:
        """Return a server's tools. If it is lost before it lists them, it gets another session, OPENINGS in all."""
        server, _ = self._servers[place]
        limit = server.config.start_timeout_s
        lost: McpServerLost | None = None
        for _ in range(OPENINGS):
            connection = await self._shared[place].connection()
            try:
                async with time_limit(limit):
                    return chosen(await connection.tools(), server.config.allow, server.key)
            except McpServerLost as error:
                lost = error
            except TimeoutError:
                raise McpServerLost(f"{server.label} listed no tools within {limit:g} s (start_timeout_s)") from None
        assert lost is not None
        raise lost

    def _sessions(self, server: McpServer, turns: asyncio.Semaphore) -> McpSessions:
        return McpSessions(server, self._connect, turns, self._first_pause_s)

    def _connect(self, server: McpServer) -> Connection:
        self._connections = [connection for connection in self._connections if not connection.ended]
        self._connections.append(self._connect_to(server))
        return self._connections[-1]

    async def _close(self) -> None:
        """End all sessions, those of episodes that were cut off, too, and wait for their servers' processes."""
        for sessions in self._shared:
            sessions.close()
        for connection in self._connections:
            connection.close()
        await to_the_end(*(connection.closed() for connection in self._connections))
