"""What is seen of the processes of a whole run: a stuck rank by its name, and no listener beyond loopback."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e import small_runs as command
from tests.e2e.small_runs import HARDLY_WARM, RL_ASYNC, finish, start
from tests.support.forked import Forked
from tests.support.ports import listeners

SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "trainer.steps=12", "trainer.checkpoint_every=2"),
    *("trainer.ranks=2", "trainer.collective_timeout_s=20", "debug.min_train_s=0.5", "eval.every=0", "eval.tasks=2"),
    *HARDLY_WARM,
    "launcher.stop_timeout_s=5",
]


@pytest.fixture
def launched(workplace: Path) -> Iterator[Forked]:
    process = start(workplace, "launch", "--config", "calculator", "--name", "stuck", *SMALL)
    yield process
    process.kill()  # its children end with it
    process.wait(10)


def pid_of(run: Path, name: str) -> int:
    return next(p["pid"] for p in json.loads((run / "processes.json").read_text()) if p["name"] == name)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_rank_is_named_and_the_run_ends_well(workplace: Path, launched: Forked) -> None:
    run, deadline = workplace / "runs" / "stuck", time.monotonic() + 180
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert launched.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    pid = pid_of(run, "trainer-1")
    os.kill(pid, signal.SIGSTOP)

    asked = subprocess.run([RL_ASYNC, "doctor", str(run)], capture_output=True, text=True, timeout=60)
    named = f"trainer rank 1 (pid {pid}) is stopped (SIGSTOP)"
    assert asked.returncode == 1, asked.stdout + asked.stderr
    assert f"verdict: {named}" in asked.stdout and f"kill -CONT {pid}" in asked.stdout

    output = finish(launched)
    assert named in output, "the run names it by itself, once its deadline has passed"
    assert output.count("the whole diagnosis: ") == 1
    assert f"verdict: {named}: rank 0 waited for it" in (run / "doctor.txt").read_text()
    assert f"rank 1 (pid {pid}) did not arrive: it is stopped (SIGSTOP)" in (run / "logs" / "trainer-0.log").read_text()
    after = subprocess.run([RL_ASYNC, "doctor", str(run)], capture_output=True, text=True, timeout=60)
    assert after.returncode == 0 and "verdict: the run ended well: all 12 steps are trained" in after.stdout


SMALL_WITHOUT_TOOLS = [
    *("trainer.ranks=2", "trainer.steps=3", "trainer.checkpoint_every=1", "data.train_batch_groups=4"),
    *("rollout.group_size=4", "eval.every=0", "queue.shards=1", *HARDLY_WARM),
]


def seen(process: Forked, run: Path) -> dict[str, set[str]]:
    """Where each process of the run listened until its end, by the process's name."""
    found: dict[str, set[str]] = {}
    while process.poll() is None:
        if (run / "processes.json").is_file():
            for record in json.loads((run / "processes.json").read_text()):
                pids = family(record["pid"])
                found.setdefault(record["name"], set()).update(listeners(pids))
        found.setdefault("launcher", set()).update(listeners([process.pid]))
        time.sleep(0.1)
    assert process.returncode == 0, process.communicate()[1][-4000:]
    return found


def family(pid: int) -> list[int]:
    """The process and those that it started."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def assert_on_loopback(found: dict[str, set[str]], *named: str) -> None:
    assert all(found[name] for name in named), found
    elsewhere = {a for addresses in found.values() for a in addresses if not a.startswith("127.0.0.1:")}
    assert not elsewhere, found


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("mode", ["disaggregated", pytest.param("colocated", marks=pytest.mark.nightly)])
def test_a_whole_run_listens_on_loopback_only(workplace: Path, mode: str) -> None:
    options = ["launch", "--mode", mode, "--config", "calculator", "--name", mode, *SMALL_WITHOUT_TOOLS]
    if mode == "colocated":
        options[options.index("calculator")] = "calculator-sync"
    process = command.start(workplace, *options)
    try:
        found = seen(process, workplace / "runs" / mode)
    finally:
        process.kill()
    assert_on_loopback(found, "engine-0", "trainer-0", "trainer-1")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_fine_tuning_listens_on_loopback_only(workplace: Path) -> None:
    answers = ({"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"})
    line = json.dumps({"messages": answers}) + "\n"
    (workplace / "chats.jsonl").write_text(line * 40)
    model = next((workplace / "artifacts").rglob("config.json")).parent
    shutil.copytree(model, workplace / "base")
    settings = ("--model", "base", "--data", "chats.jsonl", "--out", "tuned", "--epochs", "4", "--batch-size", "4")
    process = command.start(workplace, "sft", *settings, "trainer.ranks=2")
    try:
        found = seen(process, workplace / "tuned.run")
    finally:
        process.kill()
    assert_on_loopback(found, "trainer-0", "trainer-1")
