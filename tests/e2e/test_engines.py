"""Engines that are added to a run and taken away again, killed, or lent the trainer's devices."""

import gzip
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rl_async.launcher.cli.__main__ import main
from rl_async.process.http_auth import bearer, run_token
from rl_async.recording import files_of_step, read_trajectories
from tests.e2e import small_runs as command
from tests.e2e.small_runs import APART, HARDLY_WARM, RL_ASYNC, succeed
from tests.support.forked import Forked
from tests.support.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SMALL = [
    *("data.train_batch_groups=4", "rollout.group_size=4", "trainer.steps=1000", "debug.min_train_s=0.3"),
    *HARDLY_WARM,
    "eval.tasks=4",
    *("weight_sync.timeout_s=5", "launcher.stop_timeout_s=5"),
]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(workplace: Path) -> Iterator[Start]:
    """Starts processes in ``workplace``; what is left of them is killed by pid."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str) -> "subprocess.Popen[str]":
        with (workplace / f"{len(started)}.out").open("w") as output:
            started.append(subprocess.Popen(command, cwd=workplace, stdout=output, stderr=output, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait(10)


def engine(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [RL_ASYNC, "engine", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)


def sampled(url: str, run: Path) -> float:
    """Tokens that the engine has sampled."""
    request = urllib.request.Request(f"{url}/metrics", headers=bearer(run_token(run, "engines")))
    with urllib.request.urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def until(condition: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.timeout(300)
def test_an_added_engine_gets_weights_then_requests_and_may_leave_or_die(workplace: Path, start: Start) -> None:
    run = workplace / "runs" / "mine"
    launched = start(RL_ASYNC, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", "mine", *SMALL)
    metrics = run / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, "no step was trained")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    assert "no embedded engine answers" in engine(workplace, "add", "runs/mine", url, "--engine", "embedded").stderr
    added = start(
        sys.executable, "-m", "rl_async.rollout_server", "--run", "runs/mine", "--index", "7", "--port", str(port)
    )
    until(lambda: answers(url), "the added engine did not start")
    assert sampled(url, run) == 0

    done = engine(workplace, "add", "runs/mine", url, "--engine", "embedded")
    assert done.returncode == 0, done.stderr
    name, _, rest = done.stdout.partition(" ")
    assert name.startswith(f"added-{port}-") and rest.startswith("serves version 0.")
    until(lambda: sampled(url, run) > 0, "the added engine gets no requests")
    assert name in engine(workplace, "list", "runs/mine").stdout
    assert "has it already" in engine(workplace, "add", "runs/mine", url, "--engine", "embedded").stderr

    assert "rollout.engines" in engine(workplace, "remove", "runs/mine", "engine-0").stderr
    assert "no engine nobody" in engine(workplace, "remove", "runs/mine", "nobody").stderr
    assert engine(workplace, "remove", "runs/mine", name).returncode == 0
    assert f"added-{port}" not in engine(workplace, "list", "runs/mine").stdout

    assert engine(workplace, "add", "runs/mine", url, "--engine", "embedded").returncode == 0
    added.kill()
    until(lambda: f"added-{port}" not in engine(workplace, "list", "runs/mine").stdout, "the dead engine was kept")
    before = len(metrics.read_text().splitlines())
    until(lambda: len(metrics.read_text().splitlines()) > before + 2, "the run does not go on")

    assert launched.poll() is None
    psutil.Process(launched.pid).terminate()
    launched.wait(30)
    *rows, _ = (json.loads(line) for line in metrics.read_text().splitlines())  # the step that ended the run may be the
    assert {row["sync/engines"] for row in rows} == {1.0, 2.0}  # last line: it is saved, and not published
    gone = engine(workplace, "list", "runs/mine")
    assert gone.returncode == 2 and "runs/mine" in gone.stderr


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


def lent_engine_until(run: Forked, condition: Callable[[], bool], what: str, timeout_s: float = 150) -> None:
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


@pytest.mark.timeout(300)
def test_no_sample_is_lost_with_an_engine_that_dies_while_devices_change_hands(
    workplace: Path, launched: Forked
) -> None:
    folder = workplace / "runs" / "lent"
    killed = []
    for phase in ("training", "publishing"):  # the devices go back to the trainer; they are lent
        lent_engine_until(launched, lambda: serves_again(folder) and lent(folder)["pid"] not in killed, "lent again")
        lent_engine_until(launched, lambda phase=phase: in_phase(folder, phase), phase)  # type: ignore[misc]
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


HALT_S, PERIOD_S = 0.9, 1.0


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_run_goes_on_without_an_engine_that_stands_still_most_of_the_time(workplace: Path) -> None:
    folder, words = workplace / "runs" / "halting", [*SMALL, "rollout.engines=2", "trainer.steps=60", "eval.every=0"]
    run = command.start(workplace, "launch", "--config", "calculator", "--name", "halting", *words)
    try:
        lent_engine_until(run, lambda: len(metrics(folder)) >= 10, "ten steps")
        roster = json.loads((folder / "processes.json").read_text())
        halting = psutil.Process(next(process["pid"] for process in roster if process["name"] == "engine-1"))
        began, deadline = len(metrics(folder)), time.monotonic() + 150
        while (ended := len(metrics(folder))) < began + 30:
            assert run.poll() is None and time.monotonic() < deadline
            halting.suspend()
            time.sleep(HALT_S)
            halting.resume()
            time.sleep(PERIOD_S - HALT_S)
        output = "".join(part or "" for part in run.communicate(timeout=200))
    finally:
        run.kill()
    assert run.returncode == 0, output[-4000:]

    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/halting")
    rows = metrics(folder)
    without = [row["sync/engines"] == 1 for row in rows[began:ended]]
    assert sum(without) > len(without) / 2, "most publications do not wait for it"
    assert rows[-1]["sync/engines"] == 2, "it is waited for again once it is as quick as the other"
    assert [process["restarts"] for process in json.loads((folder / "processes.json").read_text())] == [0] * len(roster)


# The presets of images: `vision` learns to read digits in both modes, and nothing from noise; `grid` uses a
# tool. Learning takes minutes, so `make test-slow` runs a few steps.


def test_a_run_of_images_is_audited_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = (*SMALL, "trainer.steps=2", "debug.min_train_s=0")
    succeed(tmp_path, "launch", "--config", "vision", "--mode", "disaggregated", "--name", "seen", *short)
    assert [row["step"] for row in metrics(tmp_path / "runs/seen")] == [0, 1]
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "runs/seen"]) == 0
    capsys.readouterr()
    assert main(["show", "runs/seen"]) == 0
    assert "image/png, 32 x 32 pixels" in capsys.readouterr().out


def held_out(folder: Path) -> list[float]:
    """The held-out rewards of a run, of the initial weights first."""
    return [json.loads(line)["eval/reward"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_a_model_learns_to_read_digits(mode: str, tmp_path: Path) -> None:
    succeed(tmp_path, "launch", "--config", "vision", "--mode", mode, "--name", "read", timeout_s=800)
    first, *_, last = held_out(tmp_path / "runs/read")
    # Half of the demonstrations guess a digit.
    assert first < 0.75
    # The preset ends at 0.98; four standard deviations of 64 tasks are 0.07.
    assert last >= 0.9


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_model_learns_to_zoom_and_to_read_the_tools_image(tmp_path: Path) -> None:
    succeed(tmp_path, "launch", "--config", "grid", "--mode", "disaggregated", "--name", "find", timeout_s=800)
    run = tmp_path / "runs/find"
    first, *_, last = held_out(run)
    # Most demonstrations guess a quarter or a row.
    assert first < 0.6
    # The preset ends at 0.92; four standard deviations of 64 tasks are 0.14.
    assert last >= 0.78
    (file,) = files_of_step(run / "trajectories", 0)
    rows = [row for row in read_trajectories(file) if len(row.media) == 2]
    assert rows
    for row in rows:
        # The tool's image is behind the call, and the answer behind it.
        call, answer = np.flatnonzero(np.diff(row.loss_mask.astype(int)) == 1)
        assert row.media[0].position < call < row.media[1].position < answer


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_nothing_is_learned_from_noise(tmp_path: Path) -> None:
    """The likeliest sum is right in a tenth of the tasks; five standard deviations of 64 of them are 0.19."""
    data = "data.make=noise", "warm_start.gate=0", "trainer.steps=20"
    succeed(
        tmp_path, "launch", "--config", "vision", "--mode", "disaggregated", "--name", "noise", *data, timeout_s=800
    )
    assert max(held_out(tmp_path / "runs/noise")) <= 0.29
