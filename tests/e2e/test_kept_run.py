"""A run that version 0.2.0 made before its files were merged is read and goes on: formats outlive the modules."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.e2e import command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
# The folder of a run of four steps with a checkpoint, its journal and its trajectories, and the data and model it used.
KEPT = Path(__file__).with_name("kept_run.tar.xz")


def test_a_run_of_an_earlier_commit_is_shown_and_resumed(tmp_path: Path) -> None:
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    run, config = "runs/kept", "runs/kept/config.yaml"
    assert "step 1" in command.succeed(tmp_path, "show", run, "--step", "1")
    again = ("--mode", "disaggregated", "--config", config, "--name", "kept", "--resume", "trainer.steps=6")
    command.succeed(tmp_path, "launch", *again)
    lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["lineage"], line["step"]) for line in lines if "reward/mean" in line] == [
        *((0, step) for step in range(4)),
        *((1, step) for step in range(4, 6)),
    ]
    audited = command.succeed(tmp_path, "audit", run)
    assert audited.startswith("24 groups admitted, 0 given up, 24 trained with 48 rows\nok: "), audited
