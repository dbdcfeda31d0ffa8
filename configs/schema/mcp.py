"""Section `agent.mcp`: the servers of the Model Context Protocol whose tools the model may call."""

from typing import Annotated, Literal

import msgspec

from rl_async.configs.base import Config, Seconds, doc


class McpServerConfig(Config, frozen=True):
    """A server that is started by its ``command`` or reached at its ``url``."""

    name: Annotated[
        str, doc("Name in logs and errors, and prefix of its tools where another server has one of the same name.")
    ] = ""
    command: Annotated[
        tuple[str, ...] | str,
        doc("Program and arguments, as a list or a text that is split like one; no shell. {workspace}: a new folder."),
    ] = ()
    url: Annotated[str, doc("Instead of command: the address of a server with streamable HTTP.")] = ""
    env: Annotated[
        dict[str, str], doc("Variables for the command, which gets PATH, HOME, USER and TERM of ours besides.")
    ] = msgspec.field(default_factory=dict)
    env_from: Annotated[
        tuple[str, ...], doc("Variables of the environment to pass on to the command, such as keys; stored nowhere.")
    ] = ()
    headers_from: Annotated[
        dict[str, str],
        doc("HTTP headers for url, each with the NAME of the environment variable that holds its value."),
    ] = msgspec.field(default_factory=dict)
    allow: Annotated[tuple[str, ...], doc("The tools to offer, by the server's names for them; empty: all.")] = ()
    scope: Annotated[
        Literal["episode", "worker"],
        doc("Who shares a session: nobody, each episode gets its own; or all episodes of an agent worker."),
    ] = "episode"
    start_timeout_s: Annotated[Seconds, doc("Deadline for a session to begin, the command's start included.")] = 60.0
