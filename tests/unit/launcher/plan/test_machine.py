import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from rl_async.configs.load.loader import load_config
from rl_async.errors import UserError
from rl_async.launcher.plan import machine
from rl_async.launcher.plan.machine import check_engines, check_expert_names, check_sharing, count_gpus, plan_here


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


def test_sglang_needs_a_gpu_to_start_and_none_to_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = load_config("calculator", ["rollout.engine=sglang"])
    with pytest.raises(UserError, match=r"rollout\.engine=sglang.*model\.device"):
        check_engines(config, on_gpus=True)
    assert plan_here(config, tmp_path / "run").engines[0].engine_kind == "sglang"
    check_engines(load_config("calculator", []), on_gpus=True)


def test_megatron_must_be_installed_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("calculator", ["trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor_parallel=2"])
    looked: list[str] = []
    monkeypatch.setattr(machine, "find_spec", looked.append)
    with pytest.raises(UserError, match=r"trainer\.backend=megatron.*pip install 'rl-async\[megatron\]'"):
        plan_here(config, tmp_path / "run")
    assert looked == ["megatron"]
    plan_here(load_config("calculator", []), tmp_path / "run")


@pytest.mark.parametrize(
    ("backend", "engine", "refused"),
    [
        ("fsdp2", "sglang", True),
        ("fsdp2", "[embedded, sglang]", True),
        ("fsdp2", "embedded", False),
        ("fsdp2", "vllm", False),
        ("megatron", "embedded", True),
        ("megatron", "sglang", False),
        ("megatron", "vllm", False),
    ],
)
def test_experts_are_refused_where_trainer_and_engine_name_them_differently(
    tmp_path: Path, backend: str, engine: str, refused: bool
) -> None:
    engines = 2 if engine.startswith("[") else 1
    config = load_config(
        "calculator",
        [
            f"model.path={tmp_path}",
            f"trainer.backend={backend}",
            f"rollout.engine={engine}",
            f"rollout.engines={engines}",
        ],
    )
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"model_type": "qwen3"}))
    check_expert_names(config)
    (tmp_path / "config.json").write_text(json.dumps(shape | {"model_type": "qwen3_moe", "num_experts": 4}))
    with pytest.raises(UserError, match=r"rollout\.engine") if refused else nullcontext():
        check_expert_names(config)


def test_peft_must_be_installed_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"trainer\.lora.*pip install 'rl-async\[lora\]'"):
        plan_here(load_config("calculator", ["trainer.lora={}"]), tmp_path / "run")
    plan_here(load_config("calculator", []), tmp_path / "run")


@pytest.mark.parametrize("key", ["trainer.attention=flash", "trainer.kernels=liger"])
def test_kernels_must_be_installed_where_there_is_a_gpu(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    config = load_config("calculator", [key, "model.dtype=bfloat16"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=f"{key} .*GPU"):
        plan_here(config, tmp_path / "run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=f"{key}: .*pip install .*rl-async"):
        plan_here(config, tmp_path / "run")


def test_rows_that_ranks_cannot_share_are_refused_before_anything_starts(tmp_path: Path) -> None:
    warm = ["model.path=none", "warm_start.out=none", "trainer.ranks=3", "trainer.sequence_parallel=3"]
    with pytest.raises(UserError, match=r"sequence_parallel=3 .*model\.path=none: .*its 4 attention heads"):
        check_sharing(load_config("calculator", warm))
    config = load_config("calculator", [f"model.path={tmp_path}", "trainer.ranks=2", "trainer.sequence_parallel=2"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "stablelm", "num_attention_heads": 4}))
    with pytest.raises(UserError, match="cannot be packed: models of type stablelm"):
        check_sharing(config)
    file.write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 4}))
    check_sharing(config)
