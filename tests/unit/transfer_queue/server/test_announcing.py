"""What followers of the registry of engines are told, and how much of it, when many engines change."""

import pytest

from rl_async import messages as m
from rl_async.transfer_queue.transitions import EnginesChanged
from rl_async.transfer_queue.verbs import ANSWER_S
from tests.unit.transfer_queue.server.served import Served

WAIT_S = 30.0


def engines(served: Served, count: int) -> None:
    for number in range(count):
        served.ask("t", m.RegisterEngine(engine_id=f"e{number}", url="http://h:1", kind="vllm"))


@pytest.fixture
def served() -> Served:
    served = Served()
    served.hello("t", *(f"w{n}" for n in range(20)))
    engines(served, 10)
    served.now += 1.0
    served.server.tick()
    return served


def follow(served: Served, name: str, after: int) -> list[int]:
    """The revisions that a reader is told at once."""
    answers = served.ask(name, m.ListEngines(after=after, wait_s=WAIT_S))
    return [answer.response.reply.revision for answer in answers]


def test_changes_that_come_together_are_told_together(served: Served) -> None:
    for n in range(20):
        assert follow(served, f"w{n}", 10) == []
    first = served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert len(first) == 21
    for n in range(20):
        assert follow(served, f"w{n}", 11) == []
    for number in range(1, 10):
        assert len(served.ask("t", m.Confirm(engine_id=f"e{number}", version=m.Version()))) == 1
    served.now += 21 * ANSWER_S
    told = [answer.response.reply.revision for answer in served.server.tick()]
    assert told == [20] * 20


def test_a_reader_that_knows_nothing_and_one_that_will_not_wait_are_told_at_once(served: Served) -> None:
    assert follow(served, "w0", 9) == [10]
    served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert follow(served, "w1", 10) == [], "w0 was told just now"
    assert follow(served, "w2", -1) == [11]
    (now,) = served.ask("w3", m.ListEngines(after=10, wait_s=0.0))
    assert now.response.reply.revision == 11


def test_a_reader_that_asks_in_between_takes_no_announcement_from_those_that_wait(served: Served) -> None:
    assert follow(served, "w0", 9) == [10]
    assert follow(served, "w1", 10) == []
    served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    served.now += 2 * ANSWER_S
    assert follow(served, "w2", 10) == [11]
    served.now += 2 * ANSWER_S
    (answer,) = served.server.tick()
    assert (answer.identity, answer.response.reply.revision) == (b"w1", 11)


def test_a_reader_is_answered_at_its_deadline(served: Served) -> None:
    assert follow(served, "w0", 10) == []
    served.now += WAIT_S
    (answer,) = served.server.tick()
    assert (answer.identity, answer.response.reply.revision) == (b"w0", 10)
    assert served.server.tick() == []


def test_a_lost_connection_and_a_repeated_request_leave_nothing_parked(served: Served) -> None:
    answer = served.ask("w0", m.Status())[0]
    follow(served, "w0", 10)
    follow(served, "w1", 10)
    served.server.undelivered(answer)
    served.now += 1.0
    answers = served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert [answer.identity for answer in answers] == [b"t", b"w1"]


def test_the_journal_gets_one_engine_of_each_that_confirms(served: Served) -> None:
    before = len(served.seen)
    for number in range(10):
        served.ask("t", m.Confirm(engine_id=f"e{number}", version=m.Version()))
    changes = served.seen[before:]
    assert len(changes) == 10
    assert not any(isinstance(change, EnginesChanged) for change in changes)
