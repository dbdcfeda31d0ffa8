"""Runs with roles that are killed, and runs that are interrupted or lose their launcher: they go on, or are resumed."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_async.launcher.plan.artifacts import checkpoints
from tests.e2e.small_runs import (
    STEPS,
    Run,
    assert_complete,
    finish,
    kill,
    log_of,
    pids,
    roles_left,
    succeed,
    wait_for_steps,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_killed_engine_and_worker_and_then_trainer(home: Path, start: Callable[..., Run]) -> None:
    """Engines and workers are replaced without a step trained twice; the trainer goes on from its checkpoint."""
    run = start("killed", "debug.min_train_s=0.5")
    for steps, victim in ((1, "engine-0"), (3, "worker-0"), (6, "trainer-0")):
        wait_for_steps(home, "killed", steps, run)
        kill(home, "killed", victim)
    finish(run)
    rows = assert_complete(home, "killed", bound=1)
    first, second = ([m["step"] for m in rows if m["lineage"] == lineage] for lineage in (0, 1))
    assert first == list(range(len(first))) and len(first) >= 6
    assert second == list(range(second[0], STEPS)) and second[0] in (4, 6), "the last checkpoint, of every second step"


@pytest.mark.slow
def test_a_killed_colocated_trainer_wakes_the_engines_it_left_asleep(home: Path, start: Callable[..., Run]) -> None:
    run = start("asleep", "debug.min_train_s=0.5", mode="colocated", config="calculator-sync")
    wait_for_steps(home, "asleep", 5, run)
    engine = pids(home, "asleep")["engine-0"]
    kill(home, "asleep", "trainer-0")  # most of a step is training, while the engine sleeps
    wait_for_steps(home, "asleep", 7, run)
    assert pids(home, "asleep")["engine-0"] == engine, "the engine was replaced"
    finish(run)
    assert {m["lineage"] for m in assert_complete(home, "asleep", bound=0)} == {0, 1}


@pytest.mark.slow
def test_interrupt_and_resume_everything(home: Path, start: Callable[..., Run]) -> None:
    run = start("resumed", "debug.min_train_s=0.3", "launcher.stop_timeout_s=40")
    wait_for_steps(home, "resumed", 5, run)
    run.send_signal(signal.SIGINT)
    finish(run, code=130)
    saved = re.search(r"asked to stop: saving (\d+) completed steps", log_of(home, "resumed", "trainer-0"))
    assert saved is not None
    finish(start("resumed"))  # --resume is the default for a run that did not reach its end
    assert f"resuming at step {saved[1]} as lineage 1" in log_of(home, "resumed", "trainer-0"), "no step was lost"
    assert_complete(home, "resumed", bound=1)
    journals = re.findall(r"(\d+) transitions in the journal", log_of(home, "resumed", "queue"))
    assert len(journals) == 2 and int(journals[0]) == 0 < int(journals[1]), "the second queue goes on from the first"
    assert re.search(r"the queue kept [1-9]\d* groups and admits 0 again", log_of(home, "resumed", "trainer-0"))


def kill_launcher(home: Path, name: str, run: Run) -> None:
    """Return when no process of the run is left."""
    run.kill()
    run.wait(timeout=30)
    deadline = time.monotonic() + 60
    while roles_left(home, name):
        assert time.monotonic() < deadline, "roles outlived the launcher"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("journal", ["sqlite", pytest.param("memory", marks=pytest.mark.nightly)])
def test_a_run_that_lost_its_launcher_before_the_first_checkpoint_is_resumed(
    home: Path, start: Callable[..., Run], journal: str
) -> None:
    name = f"unsaved-{journal}"
    run = start(name, f"queue.journal={journal}", "trainer.checkpoint_every=0", "debug.min_train_s=0.3")
    wait_for_steps(home, name, 2, run)
    kill_launcher(home, name, run)
    assert not checkpoints(home / "runs" / name)
    finish(start(name))
    assert_complete(home, name, bound=1)


@pytest.mark.slow
def test_a_run_that_lost_its_launcher_after_the_last_checkpoint_is_resumed_to_tell_its_end(
    home: Path, start: Callable[..., Run]
) -> None:
    run = start("untold", "debug.min_train_s=0.3", "trainer.checkpoint_every=1")
    wait_for_steps(home, "untold", 3, run)
    kill_launcher(home, "untold", run)
    done = checkpoints(home / "runs" / "untold")[-1]
    finish(start("untold", f"trainer.steps={done}"))
    assert succeed(home, "audit", "runs/untold").splitlines()[-1].startswith("ok: ")
    assert "give a larger number" in finish(start("untold", "--resume", f"trainer.steps={done}"), code=2)


@pytest.mark.slow
def test_an_interrupted_run_saves_a_step_that_is_longer_than_its_stop_timeout(
    home: Path, start: Callable[..., Run]
) -> None:
    """Also without any checkpoint before."""
    run = start("long", "trainer.checkpoint_every=0", "debug.min_train_s=8", "launcher.stop_timeout_s=2")
    wait_for_steps(home, "long", 1, run)
    run.send_signal(signal.SIGINT)
    output = finish(run, code=130)
    saved = [int(path.name.removeprefix("step-")) for path in (home / "runs" / "long" / "checkpoints").iterdir()]
    assert saved in ([1], [2]), output
    assert "--resume --name long" in output


@pytest.mark.slow
def test_a_run_goes_on_when_its_queue_is_killed_three_times(home: Path, start: Callable[..., Run]) -> None:
    process = start("queue-killed")
    for steps in (1, 3, 5):
        wait_for_steps(home, "queue-killed", steps, process)
        kill(home, "queue-killed", "queue")
    finish(process)
    rows = assert_complete(home, "queue-killed", bound=1)
    assert len(rows) == STEPS, "no step was trained twice: the trainer never noticed"


@pytest.mark.slow
def test_two_ranks_go_on_when_the_only_payload_shard_is_killed(home: Path, start: Callable[..., Run]) -> None:
    """Twice, and then the trainer, whose batches since the checkpoint are partly lost. All keep their members."""
    run = start("shards", "queue.shards=1", "trainer.ranks=2", "debug.min_train_s=0.3")
    for steps in (2, 4):
        wait_for_steps(home, "shards", steps, run)
        kill(home, "shards", "shard-0")
    wait_for_steps(home, "shards", 6, run)
    kill(home, "shards", "trainer-0")
    finish(run)
    assert_complete(home, "shards", bound=1)
    ledger = [json.loads(line) for line in (home / "runs" / "shards" / "ledger.jsonl").read_text().splitlines()]
    lost = [line for line in ledger if line["event"] == "lost"]
    assert len(lost) == 2 and all(line["rows"] for line in lost)
