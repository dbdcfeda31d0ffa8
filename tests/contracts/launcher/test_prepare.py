"""The preparation as a process: data, tokenizer, model, gate; fine-tuning. One optimizer step is enough here."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.toy_tasks import make_data
from rl_async.configs.load import dump, load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.launcher.plan.artifacts import SFT_FILE, Origin, needs_preparation, origin_of
from rl_async.launcher.plan.trials import try_environment
from tests.support.forked import Forked

QUICK = [
    "warm_start.min_steps=0",
    "warm_start.check_every=1",
    "warm_start.batch_size=2",
    "warm_start.gate_tasks=2",
    "warm_start.hidden_size=32",
    "warm_start.gate=0",
    "rollout.max_model_len=1024",
]


def prepare(folder: Path, *overrides: str) -> tuple[int | None, str]:
    """Its exit code, and what it said on standard error."""
    (folder / "config.yaml").write_text(dump(load_config("calculator", [*QUICK, *overrides])))
    process = Forked("rl_async.launcher.runs.prepare", "--config", "config.yaml", cwd=folder)
    _, errors = process.communicate(timeout=150)
    return process.returncode, errors


def few(name: str, folder: Path) -> None:
    """Write the data that a preparation would write there, but less of it."""
    make_data(name, folder / "artifacts" / name, train=64, held_out=8, demos=240)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which data and a model were made."""
    folder = tmp_path_factory.mktemp("prepared")
    code, errors = prepare(folder)
    assert code == 0, errors
    return folder


def test_data_and_model_are_made_once_and_whole(prepared: Path) -> None:
    model = prepared / "artifacts" / "calculator" / "model"
    names = {file.name for file in model.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", SFT_FILE} <= names
    assert json.loads((model / SFT_FILE).read_text())["steps"] == 1
    assert [path.name for path in model.parent.iterdir() if path.name.startswith(".")] == []
    paths = [
        f"{key}={prepared}/artifacts/calculator/{name}"
        for key, name in (
            *(("model.path", "model"), ("warm_start.out", "model")),
            *(("data.path", "train.parquet"), ("data.eval_path", "test.parquet")),
        )
    ]
    assert not needs_preparation(
        load_config(
            "calculator",
            [*QUICK, *paths, "warm_start.demos_path=artifacts/calculator/demos.parquet"],
        )
    )


def test_a_gate_that_is_never_reached_leaves_no_model(tmp_path: Path) -> None:
    few("calculator", tmp_path)
    code, errors = prepare(tmp_path, "warm_start.gate=1.0", "warm_start.max_steps=2")
    assert code == 2
    assert errors.splitlines()[-1].startswith("error: the warm start reached a greedy reward of 0.00")
    assert "Traceback" not in errors
    assert {path.name for path in (tmp_path / "artifacts" / "calculator").iterdir()} == {
        "train.parquet",
        "test.parquet",
        "demos.parquet",
    }


@pytest.mark.slow
def test_a_pretrained_model_is_fine_tuned_on_demonstrations(prepared: Path, tmp_path: Path) -> None:
    few("market", tmp_path)
    base, made = prepared / "artifacts/calculator/model", tmp_path / "artifacts/market/model"
    market = [
        *("model.path=artifacts/market/model", "data.make=market", "rollout.max_model_len=1024"),
        *("data.path=artifacts/market/train.parquet", "data.eval_path=artifacts/market/test.parquet"),
        "warm_start={demos_path: artifacts/market/demos.parquet, out: artifacts/market/model, "
        f"pretrained: {{path: {base}, batch_size: 240}}}}",
    ]
    (tmp_path / "config.yaml").write_text(dump(load_config("calculator", market)))
    process = Forked("rl_async.launcher.runs.prepare", "--config", "config.yaml", cwd=tmp_path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert (made / "tokenizer.json").read_text() == (base / "tokenizer.json").read_text()
    assert (made / "model.safetensors").read_bytes() != (base / "model.safetensors").read_bytes()
    steps = (made.with_name("model.run") / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 1
    made_from = msgspec.json.decode((made / SFT_FILE).read_bytes(), type=Origin)
    settings = load_config("calculator", market).warm_start
    assert settings is not None and settings.demos_path.startswith("artifacts/") and made_from.demos
    assert made_from.fingerprint == origin_of(settings).fingerprint


# An environment is tried before a run begins.


WORLD = """
from pathlib import Path
from rl_async.errors import ConfigError
class World:
    def __init__(self, task, what=""): self.task, self.what = task, what
    def reset(self):
        if self.what == "raises": raise OSError("no such level")
        if self.what == "hangs":
            import time; time.sleep(600)
        if self.what == "exits":
            import os; os._exit(7)
        if self.what == "refuses": raise ConfigError("agent.environment: not this one")
        Path("tried").write_text(self.task.extra["level"])
        return 7 if self.what == "number" else "begin"
    def close(self): Path("closed").write_text("")
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("world.py").write_text(WORLD)
    row = {"data_source": "d", "prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "1"}}
    Path("rows.jsonl").write_text(json.dumps(row | {"extra_info": {"level": "first"}}) + "\n")

    def made(*overrides: str) -> RunConfig:
        data = ("data.path=rows.jsonl", "data.eval_path=null", "data.make=null", "eval.every=0")
        return load_config("calculator", [*data, "agent.environment=world.py:World", *overrides])

    return made


def test_an_environment_begins_and_ends_an_episode_of_the_first_task(config: Any) -> None:
    try_environment(config())
    assert Path("tried").read_text() == "first" and Path("closed").exists()


@pytest.mark.parametrize(
    "what",
    ["raises", "hangs", *(pytest.param(what, marks=pytest.mark.slow) for what in ("refuses", "number", "exits"))],
)
def test_one_that_the_run_could_not_use_is_refused_with_its_key(config: Any, what: str) -> None:
    given = config(f"agent.environment_options={{what: {what}}}", "agent.environment_timeout_s=2")
    with pytest.raises(ConfigError, match=r"^agent\.environment: "):
        try_environment(given)


def test_what_the_run_does_not_use_is_not_tried(config: Any) -> None:
    try_environment(config("agent.environment_options={what: raises}", "agent.environment=null"))
    assert not Path("tried").exists()
