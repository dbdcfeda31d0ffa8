"""How many threads each process gets of a machine's cores."""

from pathlib import Path

import pytest

from rl_async.configs.load.loader import load_config
from rl_async.launcher.plan.dry_run import plan_notes
from rl_async.launcher.plan.machine import plan_here
from rl_async.launcher.plan.memory import ModelSize
from rl_async.launcher.plan.threads import SMALL, cores, with_threads

LARGE = ModelSize(parameters=SMALL, kv_per_token=1)


@pytest.mark.parametrize(
    ("mode", "available", "engines", "ranks", "threads"),
    [
        ("colocated", 2, 1, 1, 2),  # they take turns
        ("colocated", 8, 2, 4, 2),
        ("disaggregated", 2, 1, 1, 1),
        ("disaggregated", 16, 1, 3, 4),
        ("disaggregated", 1.5, 1, 1, 1),
        ("disaggregated", 8, 0, 2, 4),  # fine-tuning has no engines
    ],
)
def test_cores_are_divided_among_those_that_compute_at_once(
    mode: str, available: float, engines: int, ranks: int, threads: int
) -> None:
    config = load_config("calculator", [f"trainer.ranks={ranks}"], mode=mode)
    assert config.launcher.threads is None
    assert with_threads(config, LARGE, available, engine_ranks=engines).launcher.threads == threads
    assert with_threads(config, None, available, engine_ranks=engines).launcher.threads == threads


def test_small_models_and_what_is_set_are_left_alone() -> None:
    small = ModelSize(parameters=SMALL - 1, kv_per_token=1)
    assert with_threads(load_config("calculator"), small, 64, engine_ranks=1).launcher.threads == 1
    config = load_config("calculator", ["launcher.threads=3"])
    assert with_threads(config, LARGE, 64, engine_ranks=1) is config


def test_a_dry_run_shows_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("rl_async.launcher.plan.machine.cores", lambda: 12.0)
    config = load_config("calculator", ["warm_start.hidden_size=512", "warm_start.layers=8"], mode="colocated")
    planned = plan_here(config, tmp_path / "run")
    assert {spec.env["OMP_NUM_THREADS"] for spec in (*planned.engines, *planned.trainers)} == {"12"}
    assert any("launcher.threads" in line and "12" in line for line in plan_notes(config, tmp_path / "run", planned))


def test_cores_are_those_of_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cores(tmp_path) == min(1.5, cores(tmp_path / "none"))
