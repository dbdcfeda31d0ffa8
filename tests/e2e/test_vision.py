"""The presets of images: `vision` learns to read digits in both modes, and nothing from noise; `grid` uses a tool."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_async.launcher.cli.__main__ import main
from rl_async.recording import files_of_step, read_trajectories
from tests.e2e.command import succeed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def held_out(folder: Path) -> list[float]:
    """The held-out rewards of a run, of the initial weights first."""
    return [json.loads(line)["eval/reward"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["disaggregated", pytest.param("colocated", marks=pytest.mark.nightly)])
def test_a_model_learns_to_read_digits(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    succeed(tmp_path, "launch", "--config", "vision", "--mode", mode, "--name", "read", timeout_s=800)
    first, *_, last = held_out(tmp_path / "runs/read")
    # Half of the demonstrations guess a digit.
    assert first < 0.75
    # The preset ends at 0.98; four standard deviations of 64 tasks are 0.07.
    assert last >= 0.9
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "runs/read"]) == 0
    capsys.readouterr()
    assert main(["show", "runs/read"]) == 0
    assert "image/png, 32 x 32 pixels" in capsys.readouterr().out


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


def test_nothing_is_learned_from_noise(tmp_path: Path) -> None:
    """The likeliest sum is right in a tenth of the tasks; five standard deviations of 64 of them are 0.19."""
    data = "data.make=noise", "warm_start.gate=0", "trainer.steps=20"
    succeed(
        tmp_path, "launch", "--config", "vision", "--mode", "disaggregated", "--name", "noise", *data, timeout_s=800
    )
    assert max(held_out(tmp_path / "runs/noise")) <= 0.29
