"""When a trainer ends on a signal: at the end of its step, or at once."""

import signal
import weakref
from collections.abc import Iterator

import pytest

from rl_async.trainer.ranks import StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    request = StopRequest()
    request.listen()
    yield request
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_step_it_ends_at_once(stop: StopRequest) -> None:
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143, "steps are left, so it is not 0"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_request_whose_exit_python_drops_counts_at_the_next_step(stop: StopRequest) -> None:
    class Held:
        """Something that may be referred to weakly."""

    held = Held()
    reference = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGTERM))  # as in an import
    del held
    assert reference() is None
    assert stop.requested


def test_a_step_is_finished_however_often_a_scheduler_asks(stop: StopRequest) -> None:
    stop.wait_for_step(True)
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert stop.requested


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_ctrl_c_after_the_request_ends_it_at_once(stop: StopRequest, first: int) -> None:
    stop.wait_for_step(True)
    signal.raise_signal(first)
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 130
