"""Results of servers as text."""

from typing import Any

import pytest

from rl_async.agent_loop.tools.mcp_toolbox import MOST_CHARACTERS, as_result
from rl_async.agent_loop.tools.tool import ToolResult

PNG = {"type": "image", "mimeType": "image/png", "data": "AAAA" * 100}


def result(*content: dict[str, Any], **more: Any) -> str:
    return as_result({"content": list(content), **more}).text


def test_texts_are_joined_by_lines() -> None:
    assert result({"type": "text", "text": "a"}, {"type": "text", "text": "b"}) == "a\nb"


def test_what_is_no_text_is_described() -> None:
    assert "image/png" in result(PNG) and "300 bytes" in result(PNG)
    assert "AAAA" not in result(PNG)
    link = {"type": "resource_link", "uri": "file:///a.txt", "name": "a", "mimeType": "text/plain"}
    assert "file:///a.txt" in result(link)
    assert "hologram" in result({"type": "hologram"})


def test_embedded_resources_are_their_text_or_described() -> None:
    assert result({"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}) == "inside"
    blob = result({"type": "resource", "resource": {"uri": "file:///b", "blob": "AAAA", "mimeType": "x/y"}})
    assert "file:///b" in blob and "x/y" in blob and "3 bytes" in blob


@pytest.mark.parametrize("content", [[], [PNG]])
def test_structured_content_stands_in_for_missing_text(content: list[dict[str, Any]]) -> None:
    assert result(*content, structuredContent={"sum": 5}).startswith('{"sum":5}')


def test_structured_content_is_not_repeated_beside_text() -> None:
    assert result({"type": "text", "text": "5"}, structuredContent={"sum": 5}) == "5"


def test_an_error_is_a_result_with_an_error() -> None:
    failed = as_result({"content": [{"type": "text", "text": "no such file"}], "isError": True})
    assert (failed.text, failed.error) == ("error: no such file", "no such file")
    assert as_result({"content": [], "isError": True}).error


def test_a_long_text_is_cut_and_its_length_kept() -> None:
    long = {"content": [{"type": "text", "text": "x" * (MOST_CHARACTERS + 1)}]}
    assert as_result(long) == ToolResult("x" * MOST_CHARACTERS, whole=MOST_CHARACTERS + 1)
    assert as_result(long | {"isError": True}).whole == MOST_CHARACTERS + 1
    assert as_result({"content": [{"type": "text", "text": "x" * MOST_CHARACTERS}]}).whole == 0
