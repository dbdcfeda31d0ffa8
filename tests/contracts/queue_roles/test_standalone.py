"""A queue without a run: in process, durable or not, read in batches, by torch, and by the example."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rl_async.errors import QueueLost, UserError
from rl_async.messages import Done, Leased, Refused, Task
from rl_async.transfer_queue import QueueDataset, SyncQueueClient, read_batches, serve
from rl_async.transfer_queue.delivery import numbered
from tests.contracts.queue.peers import trajectory

ROOT = Path(__file__).parents[3]


def tasks(count: int, first: int = 0) -> list[Task]:
    return list(map(numbered, range(first, first + count)))


def client(address: str, name: str = "me") -> SyncQueueClient:
    return SyncQueueClient(address, role="test", name=name, timeout_s=10)


def produce(queue: SyncQueueClient, leased: Leased) -> None:
    for group in leased.groups:
        for sample in group.samples:
            assert queue.put(trajectory(group, sample)) == Done()


def test_tasks_come_out_as_batches_and_slots_become_free():
    with serve(tasks(6), group_size=2, batch_groups=2, max_staleness=0) as address, client(address) as queue:
        seen = []
        produce(queue, queue.lease(10, 5.0))
        assert queue.lease(10, 0.0).groups == [], "the slots are taken until the batch is done"
        for batch in read_batches(queue, steps=3, timeout_s=10):
            seen.append([(row.group_id, row.sample) for row in batch.rows])
            assert [batch.tasks[group].task_id for group in sorted(batch.tasks)] == [f"t{g}" for g, _ in seen[-1][::2]]
            if batch.step < 2:
                with client(address, "other") as other:
                    other.commit(batch.step)
                    other.publish(type(other.status().published)(0, batch.step + 1), [])
                    produce(other, other.lease(10, 5.0))
        assert seen == [[(g, s) for g in (n, n + 1) for s in (0, 1)] for n in (0, 2, 4)]
        assert queue.status().payload_bytes == 0, "what is done is forgotten"


def test_reading_ends_when_the_queue_is_finished_with_what_was_ready():
    with serve(tasks(5), batch_groups=2, max_staleness=1) as address, client(address) as queue:
        produce(queue, queue.lease(10, 5.0))
        queue.finish()
        assert [batch.step for batch in read_batches(queue, timeout_s=10)] == [0, 1]


def test_a_reader_that_stops_in_the_middle_gets_the_batch_again():
    with serve(tasks(2), batch_groups=2) as address, client(address) as queue:
        produce(queue, queue.lease(10, 5.0))
        first = next(read_batches(queue, timeout_s=10))
        again = next(read_batches(queue, timeout_s=10))
        assert first.headers == again.headers and again.step == 0


def test_waiting_in_vain_says_what_was_missing():
    with (
        serve(tasks(1), batch_groups=2) as address,
        client(address) as queue,
        pytest.raises(QueueLost, match="step 0"),
    ):
        next(read_batches(queue, timeout_s=0.1))


def test_a_policy_is_one_argument_and_a_mistake_is_explained():
    important = [msgspec.structs.replace(task, priority=float(n)) for n, task in enumerate(tasks(4))]
    with serve(important, batch_groups=2, max_staleness=2, sampling="priority") as address, client(address) as queue:
        produce(queue, queue.lease(10, 5.0))
        first = next(read_batches(queue, timeout_s=10))
        assert [task.task_id for task in first.tasks.values()] == ["t2", "t3"]
    for changes, message in (
        ({"sampling": "freshst", "max_staleness": 2}, "known: fifo, freshest"),
        ({"sampling": "quota", "max_staleness": 2}, "known: fifo, freshest, priority"),
        ({"sampling": "priority"}, "nothing to choose from with max_staleness=1"),
        ({"window": 1, "batch_groups": 2}, "window=1: at least batch_groups=2"),
    ):
        with pytest.raises(UserError, match=message), serve(**changes):
            raise AssertionError("it served")


def test_producers_submit_tasks_or_bring_their_own():
    with serve(group_size=1, batch_groups=4) as address, client(address) as queue:
        assert queue.lease(1, 0.0).groups == []
        assert queue.submit(tasks(2)) == Done()
        assert [group.task.task_id for group in queue.lease(5, 5.0).groups] == ["t0", "t1"]
        (own,) = queue.lease(1, 5.0, tasks(1, first=9)[0]).groups
        assert own.task.task_id == "t9"
        assert queue.inspect().submitted == 0


def test_a_durable_queue_goes_on_where_it_was(tmp_path):
    with serve(tasks(3), folder=tmp_path, batch_groups=2) as address, client(address) as queue:
        produce(queue, queue.lease(2, 5.0))
        queue.submit(tasks(1, first=7))
    with serve(tasks(3), folder=tmp_path, batch_groups=2) as address, client(address) as queue:
        assert [batch.step for batch in read_batches(queue, steps=1, timeout_s=10)] == [0]
        assert [group.task.task_id for group in queue.lease(5, 5.0).groups] == ["t7", "t2"]
    with (
        pytest.raises(UserError, match=r"\b3\b.*\b4\b"),
        serve(tasks(4), folder=tmp_path, batch_groups=2),
    ):
        raise AssertionError("it served")


def test_what_is_wrong_with_a_queue_is_said_before_it_serves(address):
    with pytest.raises(UserError, match="group_size=0"), serve(group_size=0):
        raise AssertionError("it served")
    with serve(address=address), pytest.raises(UserError, match=address), serve(address=address):
        raise AssertionError("it served")


def test_a_dead_letter_gets_another_chance_over_the_wire():
    with serve(tasks(3), batch_groups=1, max_staleness=0) as address, client(address) as queue:
        assert isinstance(queue.requeue(0), Refused)
        for _ in range(3):
            (group,) = queue.lease(1, 5.0).groups
            queue.fail(group.group_id, 0, group.attempt, "boom")
        (letter,) = queue.inspect().dead_letters
        assert letter.group_id == 0 and "boom" in letter.error
        assert queue.requeue(0) == Done()
        (again,) = queue.lease(1, 5.0).groups
        assert (again.group_id, again.task.task_id) == (1, "t0")
        assert queue.inspect().dead_letters == []


def test_draining_stops_admission_and_not_what_was_begun():
    with serve(tasks(3), batch_groups=2) as address, client(address) as queue:
        leased = queue.lease(1, 5.0)
        queue.drain()
        assert queue.lease(1, 0.0).groups == []
        produce(queue, leased)
        report = queue.inspect()
        assert report.draining and report.status.ready == 1
        queue.drain(False)
        assert [group.group_id for group in queue.lease(1, 5.0).groups] == [1]


def test_torch_reads_batches():
    from torch.utils.data import DataLoader

    with serve(tasks(4), group_size=2, batch_groups=2) as address:
        with client(address) as queue:
            produce(queue, queue.lease(10, 5.0))
        dataset = QueueDataset(address, steps=2, timeout_s=10)
        batches = list(DataLoader(dataset, batch_size=None))
        assert [batch.step for batch in batches] == [0, 1]
        assert [row.key for row in batches[1].rows] == [(2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0)]


def test_the_api_loads_neither_torch_nor_the_server():
    code = (
        "import sys; from rl_async.transfer_queue import QueueClient, SyncQueueClient, read_batches, serve; "
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_example_runs():
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "queue_alone.py")], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "step 0: rewards [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]",
        "step 1: rewards [4.0, 4.0, 5.0, 5.0, 6.0, 6.0, 7.0, 7.0]",
    ]
