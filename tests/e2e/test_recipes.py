"""The recipe of a search agent, whole: data, warm start, training and audit."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

import rl_async
from rl_async.process.run_files import ENDED, state_of
from rl_async.recording import read_trajectories
from tests.e2e.small_runs import SMALL, STEPS, Run, finish, roles_left, succeed, wait_for_steps

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_search_agent_learns_to_search(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    # Paths in recipes are relative to the repository's root.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run([sys.executable, "examples/recipes/search/search.py"], cwd=tmp_path, check=True, timeout=120)
    config = ["--config", "examples/recipes/search/config.yaml", "--name", "search", "trainer.steps=14", "eval.every=0"]
    succeed(tmp_path, "launch", "--mode", "disaggregated", *config, timeout_s=800)
    run = tmp_path / "runs" / "search"
    assert "ok" in succeed(tmp_path, "audit", str(run))
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    # It rose from 0.28 to 0.65 and more; 432 episodes are behind each of these means.
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.15, rewards
    searches = [
        mean(sum(turn.role == "tool" for turn in row.turns) for row in read_trajectories(file))
        for file in sorted((run / "trajectories").glob("step-*"))
    ]
    assert searches[-1] > searches[0], searches


# Runs from Python, with real processes: a reward of the program, a stop, a resume, and a program that is killed.

OVERRIDES = dict(pair.split("=") for pair in SMALL)
VALUES = {key: float(value) if "." in value else int(value) for key, value in OVERRIDES.items()}


def test_a_run_with_a_reward_of_the_program(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)

    def short(solution_str: str, turns: list[rl_async.Turn]) -> dict[str, float]:
        return {"score": 1.0 / (1 + len(solution_str)), "turns": float(len(turns))}

    run = rl_async.launch("calculator", VALUES, reward=short, name="python")
    assert run.running and run.status == "running"
    with pytest.raises(rl_async.UserError, match="running"):
        rl_async.launch("calculator", VALUES, reward=short, name="python")
    assert run.wait(250, quiet=True) is run
    assert (run.status, rl_async.load(run.folder).status) == ("finished", "finished")
    metrics = run.metrics()
    assert [record["step"] for record in metrics] == list(range(STEPS))
    samples = list(run.trajectories())
    assert len(samples) == sum(record["batch/trajectories"] for record in metrics)
    for sample in samples:
        answer = sample.turns[-1].text if sample.turns[-1].role == "assistant" else ""
        assert set(sample.reward_parts) == {"short", "short/turns"}
        assert sample.reward == pytest.approx(1.0 / (1 + len(answer)))
        assert sample.reward_parts["short/turns"] == len(sample.turns)


def test_a_stopped_run_is_continued(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    run = rl_async.launch("calculator", VALUES, steps=400, name="python", detach=True)
    while not run.metrics():
        assert run.running
        time.sleep(0.05)
    # As from another program, which has no process of its own to ask.
    assert rl_async.Run(run.folder).stop().status == "stopped"
    assert run.wait(100, quiet=True).status == "stopped"
    done = len(run.metrics())
    assert 1 <= done < 400 and roles_left(workplace, "python") == []
    assert run.stop().status == "stopped"
    more = rl_async.launch("calculator", VALUES, steps=done + 1, name="python").wait(250, quiet=True)
    assert more.status == "finished"
    assert [(record["step"], record["lineage"]) for record in more.metrics()] == [
        *((step, 0) for step in range(done)),
        (done, 1),
    ]


def test_a_run_ends_in_order_with_the_program_that_started_it(workplace: Path) -> None:
    program = f"""
    import os, signal, time, rl_async
    run = rl_async.launch("calculator", {VALUES!r}, steps=400, name="python")
    while not run.metrics():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=workplace, timeout=200)
    assert killed.returncode == -signal.SIGKILL
    run = rl_async.load(workplace / "runs" / "python").wait(100, quiet=True)
    assert run.status == "stopped" and roles_left(workplace, "python") == []
    saved = max(int(path.name.split("-")[1]) for path in (run.folder / "checkpoints").glob("step-*"))
    assert saved == len(run.metrics())


def test_an_interrupt_ends_the_waiting_and_not_the_run(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    run = rl_async.launch("calculator", VALUES, steps=400, name="python")
    assert run._process is not None
    try:
        # Sent to the whole group, as a terminal and Jupyter do.
        asked = subprocess.Popen(["sh", "-c", f"sleep 1; kill -INT {os.getpid()}"])
        with pytest.raises(KeyboardInterrupt):
            run.wait(quiet=True)
        assert asked.wait(10) == 0
        assert "runs/python" in capfd.readouterr().err
        assert run.running and os.getpgid(run._process.pid) != os.getpgid(0)
    finally:
        run.stop()
    assert state_of(run._process.pid) in ENDED


def test_a_training_loop_of_ones_own_saves_when_asked_to_stop_and_goes_on(
    home: Path, start: Callable[..., Run]
) -> None:
    loop = f"trainer.loop={ROOT / 'examples' / 'own_loop.py'}:train"
    process = start("own", loop, "trainer.steps=400")
    wait_for_steps(home, "own", 3, process)
    process.terminate()
    finish(process, 128 + signal.SIGTERM)
    run = rl_async.Run(home / "runs" / "own")
    saved = len(run.metrics())
    assert (run.folder / "checkpoints" / f"step-{saved:06d}").is_dir()
    # Among these steps is one after which it evaluates.
    steps = saved + 4
    finish(start("own", loop, f"trainer.steps={steps}"))
    rows = run.metrics()
    assert [(row["step"], row["lineage"]) for row in rows] == [(step, int(step >= saved)) for step in range(steps)]
    assert [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert max(row["staleness/max"] for row in rows) <= 1
    assert "ok: every admitted group" in succeed(home, "audit", "runs/own")
