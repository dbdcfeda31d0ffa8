"""An engine on the trainer's devices, which serves while the trainer waits, and is killed when devices change hands."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import command
from tests.e2e.command import HARDLY_WARM, succeed
from tests.e2e.small_runs import APART
from tests.support.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 10
LENDING = [
    *("trainer.lend_devices=true", f"trainer.steps={STEPS}", "debug.min_iteration_s=0.03"),  # the trainer waits
    *("data.train_batch_groups=4", "rollout.group_size=4", "eval.every=0", "eval.tasks=4", "queue.lease_s=5"),
    *("weight_sync.timeout_s=10", "launcher.stop_timeout_s=5", *HARDLY_WARM),
]


@pytest.fixture
def launched(workplace: Path) -> Iterator[Forked]:
    run = command.start(
        workplace, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", "lent", *LENDING
    )
    yield run
    if run.poll() is None:
        run.kill()
        run.wait(10)


def until(run: Forked, condition: Callable[[], bool], what: str, timeout_s: float = 150) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert run.poll() is None, f"the run ended before: {what}"
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def metrics(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []


def lent(folder: Path) -> dict[str, Any]:
    listed = json.loads((folder / "processes.json").read_text())
    return next(process for process in listed if process["name"] == "lent-0")


def serves_again(folder: Path) -> bool:
    """The last publication reached the lent engine, and before it there was a step."""
    rows = metrics(folder)
    return len(rows) > 1 and rows[-1]["sync/engines"] == 2


def in_phase(folder: Path, phase: str) -> bool:
    beat = folder / "ranks" / "0.json"
    return beat.exists() and json.loads(beat.read_text())["phase"] == phase


def test_no_sample_is_lost_with_an_engine_that_dies_while_devices_change_hands(
    workplace: Path, launched: Forked
) -> None:
    folder = workplace / "runs" / "lent"
    killed = []
    for phase in ("training", "publishing"):  # the devices go back to the trainer; they are lent
        until(launched, lambda: serves_again(folder) and lent(folder)["pid"] not in killed, "lent again")
        until(launched, lambda phase=phase: in_phase(folder, phase), phase)  # type: ignore[misc]
        killed.append(lent(folder)["pid"])
        psutil.Process(killed[-1]).kill()
    output = "".join(part or "" for part in launched.communicate(timeout=200))
    assert launched.returncode == 0, output[-4000:]

    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/lent")
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert max(row["staleness/max"] for row in rows) <= 1
    assert {row["sync/engines"] for row in rows} <= {1.0, 2.0}
    assert rows[0]["correction/logprob_diff_max"] <= APART, "engines and trainer disagree about the same weights"
    text = b"".join(gzip.decompress(file.read_bytes()) for file in (folder / "trajectories").glob("step-*"))
    assert b'"lent-0"' in text and b'"engine-0"' in text
