"""The engine's spans of a request: only of one that names a span, and only of what it came to."""

import time
from collections.abc import Mapping

import pytest

from rl_async import tracing
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded import core
from rl_async.rollout_server.embedded.core import Sequence
from rl_async.tracing import Value

Added = tuple[str, int, int, Mapping[str, Value]]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Added]:
    found: list[Added] = []

    def add_below(above: str, name: str, began: int, ended: int, about: Mapping[str, Value]) -> None:
        assert above == "header"
        found.append((name, began, ended, about))

    monkeypatch.setattr(tracing, "add_below", add_below)
    return found


def sequence(traceparent: str = "header") -> Sequence:
    return Sequence(
        request_id="r",
        tokens=[1, 2, 3],
        sampling=Sampling(),
        max_tokens=2,
        stop_token_ids=frozenset(),
        seed=None,
        deliver=lambda _: None,
        traceparent=traceparent,
    )


def play(played: Sequence) -> None:
    played.admit()
    assert not played.append(4, -1.0, "0.0", 100)
    played.admit()  # again, after a preemption
    assert played.append(5, -1.0, "0.1", 100)


def test_wait_prefill_and_decoding_follow_one_another(added: list[Added]) -> None:
    began, played = time.time_ns(), sequence()
    play(played)
    core.add_spans(played)
    assert [name for name, *_ in added] == ["wait for engine", "prefill", "decode"]
    times = [began, *(time for _, start, end, _ in added for time in (start, end)), time.time_ns()]
    assert times == sorted(times)
    assert added[1][3]["gen_ai.usage.input_tokens"] == 3
    about = added[2][3]
    assert (about["gen_ai.usage.output_tokens"], about["rl_async.versions"]) == (2, ["0.0", "0.1"])


def test_what_is_aborted_while_it_waits_has_only_waited(added: list[Added]) -> None:
    waiting = sequence()
    waiting.finish_reason = "abort"
    core.add_spans(waiting)
    assert [name for name, *_ in added] == ["wait for engine"]


def test_a_request_that_names_no_span_has_none(added: list[Added]) -> None:
    played = sequence("")
    play(played)
    core.add_spans(played)
    assert not added
