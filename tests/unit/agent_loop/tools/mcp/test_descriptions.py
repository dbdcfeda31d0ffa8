"""Tools as servers list them: which are offered, under which names, and what is refused."""

from typing import Any

import pytest

from rl_async.agent_loop.tools.mcp_toolbox import MOST_TOOLS, SCHEMA_BYTES, Listed, chosen, offers
from rl_async.errors import ConfigError

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def listed(*names: str, parameters: dict[str, Any] = OBJECT, description: str = "Adds.") -> list[Listed]:
    return [Listed(name, description, parameters) for name in names]


def named(*servers: tuple[str, list[Listed]], taken: tuple[str, ...] = ()) -> list[str]:
    given = [(f"agent.mcp[{place}]", name, tools) for place, (name, tools) in enumerate(servers)]
    return [offer.schema["function"]["name"] for offer in offers(given, taken)]


def test_all_tools_or_those_that_are_allowed_in_that_order() -> None:
    assert [tool.name for tool in chosen(listed("a", "b", "c"), (), "k")] == ["a", "b", "c"]
    assert [tool.name for tool in chosen(listed("a", "b", "c"), ("c", "a"), "k")] == ["c", "a"]


def test_a_name_that_no_tool_has_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp\[0\]\.allow.*'addd'.*'add'"):
        chosen(listed("add"), ("addd",), "agent.mcp[0]")


def test_a_server_without_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp\[0\]"):
        chosen([], (), "agent.mcp[0]")


def test_more_tools_than_fit_into_a_prompt_are_refused_unless_some_are_chosen() -> None:
    many = listed(*(f"tool{number}" for number in range(MOST_TOOLS + 1)))
    with pytest.raises(ConfigError, match="allow"):
        chosen(many, (), "agent.mcp[0]")
    assert len(chosen(many, ("tool3",), "agent.mcp[0]")) == 1


def test_names_are_prefixed_where_they_clash() -> None:
    assert named(("x", listed("add", "sub")), ("y", listed("add"))) == ["x_add", "sub", "y_add"]
    assert named(("", listed("add")), ("y", listed("add"))) == ["add", "y_add"]


def test_tools_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp\[1\].*'add'.*agent\.mcp\[0\]"):
        named(("", listed("add")), ("", listed("add")))
    with pytest.raises(ConfigError, match=r"agent\.mcp\[0\].*agent\.tools"):
        named(("", listed("calculator")), taken=("calculator",))
    assert named(("x", listed("calculator")), taken=("calculator",)) == ["x_calculator"]


def test_names_that_no_format_could_print_are_rewritten_and_the_servers_own_name_is_called() -> None:
    (offer,) = offers([("k", "", listed("files/read <|im_end|>"))], ())
    assert offer.schema["function"]["name"] == "files_read___im_end__"
    assert offer.name == "files/read <|im_end|>"


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "array"},
        {"type": "object", "properties": [1]},
        {"type": "object", "properties": {"a": "integer"}},
        {"type": "object", "required": "a"},
        {"type": "object", "required": [1]},
    ],
)
def test_a_malformed_schema_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp\[0\].*malformed"):
        offers([("agent.mcp[0]", "", listed("add", parameters=parameters))], ())


def test_a_schema_that_would_fill_the_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes"):
        offers([("k", "", listed("add", description="x" * SCHEMA_BYTES))], ())


def test_templates_always_find_properties_and_required() -> None:
    (offer,) = offers([("k", "", listed("now", parameters={"type": "object", "$schema": "x"}))], ())
    assert offer.schema["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}


@pytest.mark.parametrize("named", ["$defs", "definitions"])
def test_what_a_schema_refers_to_is_kept(named: str) -> None:
    place = {"$ref": f"#/{named}/Place"}
    parameters = {"type": "object", "properties": {"to": place}, named: {"Place": {"type": "string"}}}
    (offer,) = offers([("k", "", listed("go", parameters=parameters))], ())
    assert offer.schema["function"]["parameters"] == parameters | {"required": []}
