"""Tool calls in Hermes' format, as a model may write them."""

from rl_async.agent_loop.chat_formats.hermes import CALL_END, CALL_START, parse


def test_a_call_nested_too_deeply_is_malformed() -> None:
    deep = '{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    (call,) = parse(f"{CALL_START}{deep}{CALL_END}")
    assert call.arguments is None and call.raw == deep
