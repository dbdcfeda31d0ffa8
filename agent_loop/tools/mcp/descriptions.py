"""What servers say of their tools, checked and named: pure functions. What they say is text from outside."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rl_async.errors import ConfigError

MOST_TOOLS = 64  # of one server: all their schemas stand in every prompt
SCHEMA_BYTES = 16 << 10  # of one tool's schema, its description included
NAME_CHARACTERS = 64
_OTHER = re.compile(r"[^A-Za-z0-9_-]")
# Of a schema's keys; definitions is what $defs was called until draft 7.
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
    """Name the tools of all servers, each given with its key, its name and its tools; ``taken``: other tools' names.

    Tools of one name get their servers' names as a prefix. Raises ConfigError, naming the keys, for tools that cannot
    be told apart so, and for schemas that no chat template could print.
    """
    plain = [(place, tool, _plain(tool.name)) for place, (_, _, tools) in enumerate(servers) for tool in tools]
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


def _plain(name: str) -> str:
    return _OTHER.sub("_", name)[:NAME_CHARACTERS] or "_"


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
