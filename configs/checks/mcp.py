"""Rules for `agent.mcp`: a command or a URL, and only what goes with it."""

import re
from urllib.parse import urlsplit

from rl_async.configs.derived.mcp import argv_of
from rl_async.configs.schema.mcp import McpServerConfig
from rl_async.configs.schema.run import RunConfig

NAME = re.compile(r"[A-Za-z0-9_-]{0,32}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def mcp(c: RunConfig) -> str | None:
    servers = c.agent.mcp
    names = [server.name for server in servers if server.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"agent.mcp: two servers are named {twice!r}; names tell servers and their tools apart"
    return next(filter(None, (_problem(server, f"agent.mcp[{place}]") for place, server in enumerate(servers))), None)


def _problem(server: McpServerConfig, key: str) -> str | None:
    if not NAME.fullmatch(server.name):
        return f"{key}.name may have up to 32 letters, digits, - and _, not {server.name!r}"
    for variable in (*server.env_from, *server.headers_from.values()):
        if not VARIABLE.fullmatch(variable):
            return f"{key}: env_from and headers_from hold NAMES of environment variables, never values"
    if bool(server.command) == bool(server.url):
        return f"{key} needs either command or url"
    return _url_problem(server, key) if server.url else _command_problem(server, key)


def _command_problem(server: McpServerConfig, key: str) -> str | None:
    if server.headers_from:
        return f"{key}.headers_from goes with url; a command gets variables by env or env_from"
    try:
        argv = argv_of(server)
    except ValueError as error:
        return f"{key}.command cannot be split into words: {error}"
    return None if argv and argv[0] else f"{key}.command names no program"


def _url_problem(server: McpServerConfig, key: str) -> str | None:
    if server.env or server.env_from:
        return f"{key}.env and env_from go with command; a server at a url gets headers by headers_from"
    parts = urlsplit(server.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{key}.url: {server.url!r} is not an address such as http://127.0.0.1:8000/mcp"
    if parts.username or parts.password:
        return f"{key}.url holds a user or a password; put them into a variable for headers_from"
    return None
