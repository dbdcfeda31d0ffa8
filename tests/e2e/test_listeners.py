"""No process of a whole run listens on more than loopback: every role, in both modes, and ranks of ``rl-async sft``."""

import json
import shutil
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e import command
from tests.e2e.command import HARDLY_WARM
from tests.support.forked import Forked
from tests.support.ports import listeners

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(280)]
SMALL = [
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


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_a_whole_run_listens_on_loopback_only(workplace: Path, mode: str) -> None:
    options = ["launch", "--mode", mode, "--config", "calculator", "--name", mode, *SMALL]
    if mode == "colocated":
        options[options.index("calculator")] = "calculator-sync"
    process = command.start(workplace, *options)
    try:
        found = seen(process, workplace / "runs" / mode)
    finally:
        process.kill()
    assert_on_loopback(found, "engine-0", "trainer-0", "trainer-1")


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
