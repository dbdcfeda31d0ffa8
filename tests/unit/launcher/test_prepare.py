"""The preparation as a process: data, tokenizer, model, gate. One optimizer step is enough here."""

import json
import subprocess
import sys
from pathlib import Path

from rl_async.configs.load import dump, load_config
from rl_async.launcher.artifacts import SFT_FILE, needs_preparation

QUICK = ["sft.min_steps=0", "sft.check_every=1", "sft.batch_size=2", "sft.gate_tasks=2", "sft.hidden_size=32"]


def prepare(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(dump(load_config("calculator", [*QUICK, *overrides])))
    command = [sys.executable, "-m", "rl_async.launcher.prepare", "--config", "config.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)


def test_data_and_model_are_made_once_and_whole(tmp_path: Path) -> None:
    done = prepare(tmp_path, "sft.gate=0")
    assert done.returncode == 0, done.stderr
    model = tmp_path / "artifacts" / "calculator" / "model"
    names = {file.name for file in model.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", SFT_FILE} <= names
    assert json.loads((model / SFT_FILE).read_text())["steps"] == 1
    assert [path.name for path in model.parent.iterdir() if path.name.startswith(".")] == []
    paths = [
        f"{key}={tmp_path}/artifacts/calculator/{name}"
        for key, name in (("model.path", "model"), ("data.path", "train.parquet"), ("data.eval_path", "test.parquet"))
    ]
    assert not needs_preparation(
        load_config("calculator", [*QUICK, "sft.gate=0", *paths, "sft.demos_path=artifacts/calculator/demos.parquet"])
    )


def test_a_gate_that_is_never_reached_leaves_no_model(tmp_path: Path) -> None:
    done = prepare(tmp_path, "sft.gate=1.0", "sft.max_steps=2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: the warm start reached a greedy reward of 0.00")
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "artifacts" / "calculator").iterdir()} == {
        "train.parquet",
        "test.parquet",
        "demos.parquet",
    }
