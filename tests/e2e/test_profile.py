"""Profiles of a live run: of steps that its config names, of the next step when asked, and of another process."""

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_async.process.role import py_spy
from rl_async.process.run_files import PHASES
from tests.chaos.agents.kinds import TASKS
from tests.chaos.agents.loop import write_tasks
from tests.e2e.command import HARDLY_WARM, call, start, succeed
from tests.support.forked import Forked

LOOP = Path(__file__).parents[1] / "chaos" / "agents" / "loop.py"
SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "trainer.steps=500", "eval.every=0", "eval.tasks=2"),
    *("trainer.ranks=2", "trainer.profile={steps: [1]}", f"agent.loop={LOOP}:play", f"data.path={TASKS}"),
    *HARDLY_WARM,
]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(360)]


@pytest.fixture
def launched(workplace: Path) -> Iterator[Forked]:
    write_tasks(workplace / TASKS)
    command = start(workplace, "launch", "--config", "calculator", "--name", "profiled", *SMALL)
    yield command
    command.kill()


def events(file: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_live_run_answers_with_profiles(workplace: Path, launched: Forked) -> None:
    run, deadline = workplace / "runs" / "profiled", time.monotonic() + 200
    configured = [run / "profiles" / f"step-000001-rank{rank}.json.gz" for rank in (0, 1)]
    while not all(file.exists() for file in configured):
        assert launched.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    for file in configured:
        names = {event["name"] for event in events(file)}
        assert names >= {*PHASES[1:5], "aten::mm"}

    asked = [Path(line) for line in succeed(workplace, "profile", str(run), "--steps", "2").splitlines()]
    assert len(asked) == 4 and {file.name[-13:-8] for file in asked} == {"rank0", "rank1"}
    assert all(any(event["name"] == "training" for event in events(workplace / file)) for file in asked)

    missing = call(workplace, "profile", str(run), "--process", "worker-9")
    assert missing.returncode == 2 and "--process" in missing.stderr
    if py_spy() is None:
        pytest.skip("`python -m pip install py-spy` installs py-spy")
    sampled = succeed(workplace, "profile", str(run), "--process", "worker-0", "--seconds", "1").strip()
    assert json.loads((workplace / sampled).read_text())["profiles"]


def test_a_run_that_is_over_has_no_next_step(tmp_path: Path) -> None:
    nothing = call(tmp_path, "profile", "runs/none")
    assert nothing.returncode == 2 and "runs/none" in nothing.stderr
