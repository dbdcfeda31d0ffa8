"""Some hundred schedules of the simulation; ``python -m tests.simulation`` runs any number."""

from tests.simulation.schedules import simulate
from tests.support.effort import examples


def test_every_rule_holds_in_some_schedules() -> None:
    struck, broken = simulate(range(examples(300)))
    assert not broken, broken
    assert {"message lost", "message doubled", "journal lost", "trainer killed", "worker killed"} <= struck.keys()
    assert {"trainer frozen", "replaced trainer refused by the queue"} <= struck.keys()
    assert {"queue held up", "slow disk", "worker held up", "machine held up"} <= struck.keys()
    assert {"queue killed: before the flush", "queue killed: after the flush"} <= struck.keys()
