from pathlib import Path

import pytest

from rl_async.configs.load import load_config
from rl_async.errors import UserError
from rl_async.launcher.machine import count_gpus, plan_here


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("GPU-ab,GPU-cd", 2)])
def test_visible_gpus_are_counted(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_a_gpu_that_is_asked_for_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"model\.device=cuda"):
        plan_here(load_config("calculator", ["model.device=cuda"]), tmp_path / "run")


def test_visible_gpus_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    planned = plan_here(load_config("calculator"), tmp_path / "run")
    assert (planned.trainers[0].device, planned.engines[0].device) == ("cuda:0", "cuda:1")


def test_the_judges_key_must_be_there_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    judge = "reward.judge={url: 'http://x/v1', model: m, api_key_env: JUDGE_KEY}"
    config = load_config("calculator", ["reward.functions=[{name: judge}]", judge])
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match=r"reward\.judge\.api_key_env: the environment has no JUDGE_KEY"):
        plan_here(config, tmp_path / "run")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert "secret" not in repr(plan_here(config, tmp_path / "run"))
