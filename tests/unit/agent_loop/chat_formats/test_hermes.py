"""Tool calls in Hermes' format, as a model may write them."""

import pytest

from rl_async.agent_loop.chat_formats.format import CALL_END, CALL_START, parse_hermes


def test_a_call_nested_too_deeply_is_malformed() -> None:
    deep = '{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    (call,) = parse_hermes(f"{CALL_START}{deep}{CALL_END}")
    assert call.arguments is None and call.raw == deep


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "f", "arguments": {}}', None),
        ('{"name": "f", "arguments": {}', "bad_json"),
        ('{"arguments": {}}', "no_name"),
        ('{"name": 1}', "no_name"),
        ('{"name": "f", "arguments": [1]}', "bad_arguments"),
        ('["f"]', "bad_structure"),
        ("7 times 6", "bad_json"),  # a number is no call, and what follows it no JSON
        ('{"name": 1} {"name"', "bad_json"),
        ('{"name": 1, "arguments": ' + "[" * 100_000, "bad_json"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body: str, problem: str | None) -> None:
    assert [call.problem for call in parse_hermes(f"{CALL_START}{body}{CALL_END}{CALL_START}{body}")] == [
        problem,
        "unclosed",
    ]
