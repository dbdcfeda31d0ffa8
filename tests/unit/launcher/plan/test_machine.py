import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from rl_async.accelerators import count_gpus
from rl_async.configs.engines import ENGINES
from rl_async.errors import ConfigError, DataError, UserError
from rl_async.launcher.plan import machine
from rl_async.launcher.plan.machine import (
    check_engine_ranks,
    check_engines,
    check_experts,
    check_opened,
    check_router_replay,
    check_sharing,
    plan_here,
)
from rl_async.launcher.plan.memory import model_size
from rl_async.launcher.plan.planning import plan
from tests.support.configs import float32_config


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("GPU-ab,GPU-cd", 2)])
def test_visible_gpus_are_counted(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_a_gpu_that_is_asked_for_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"model\.device=gpu"):
        plan_here(float32_config("calculator", ["model.device=gpu"]), tmp_path / "run")


def test_visible_gpus_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    planned = plan_here(float32_config("calculator"), tmp_path / "run")
    assert (planned.trainers[0].device, planned.engines[0].device) == ("gpu:0", "gpu:1")


def test_data_must_be_readable_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = ["data.path=mine.jsonl", "data.eval_path=null", "data.make=null", "warm_start.demos_path=demos.parquet"]
    config = float32_config("calculator", mine)
    (tmp_path / "mine.jsonl").write_text("{}\n")
    (tmp_path / "demos.parquet").touch()
    with pytest.raises(DataError, match=r"data\.path: mine\.jsonl, row 0"):
        plan_here(config, tmp_path / "run", gpus=1)  # under Ray, too: the queue is on this machine
    made = float32_config("calculator", [])
    path = tmp_path / str(made.data.path)
    path.parent.mkdir(parents=True)
    path.write_text("half a file")
    plan_here(made, tmp_path / "run")  # its other files are missing, and all are made


def test_the_judges_key_must_be_there_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    judge = "reward.judge={url: 'http://x/v1', model: m, api_key_env: JUDGE_KEY}"
    config = float32_config("calculator", ["reward.functions=[{name: judge}]", judge])
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match=r"reward\.judge\.api_key_env: the environment has no JUDGE_KEY"):
        plan_here(config, tmp_path / "run")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert "secret" not in repr(plan_here(config, tmp_path / "run"))


def test_sglang_needs_a_gpu_to_start_and_none_to_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = float32_config("calculator", ["rollout.engine=sglang"])
    with pytest.raises(UserError, match=r"rollout\.engine=sglang.*model\.device"):
        check_engines(config, on_gpus=True)
    assert plan_here(config, tmp_path / "run").engines[0].engine_kind == "sglang"
    check_engines(float32_config("calculator", []), on_gpus=True)


def test_megatron_must_be_installed_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = float32_config("calculator", ["trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor_parallel=2"])
    looked: list[str] = []
    monkeypatch.setattr(machine, "find_spec", looked.append)
    with pytest.raises(UserError, match=r"trainer\.backend=megatron.*pip install 'rl-async\[megatron\]'"):
        plan_here(config, tmp_path / "run")
    assert looked == ["megatron"]
    plan_here(float32_config("calculator", []), tmp_path / "run")


def test_experts_that_an_engine_cannot_quantise_are_refused() -> None:
    given = ["rollout.engine=vllm", "rollout.quantization=fp8", "model.dtype=bfloat16"]
    with pytest.raises(UserError, match=r"rollout\.quantization=fp8"):
        check_experts(float32_config("calculator-moe", given), 0)
    check_experts(float32_config("calculator-moe", given), 1)
    check_experts(float32_config("calculator-moe", ["rollout.quantization=fp8"]), 0)
    check_experts(float32_config("calculator-moe", ["rollout.engine=vllm", "rollout.tensor_parallel=2"]), 0)


@pytest.mark.parametrize(
    ("given", "gpus", "refused"),
    [
        (["rollout.engine=sglang"], 1, r"rollout\.engine=sglang"),
        (["rollout.engine=[embedded, sglang]", "rollout.engines=2"], 1, r"rollout\.engine=sglang"),
        (["rollout.engine=vllm"], 0, r"rollout\.engine=vllm"),
        (["rollout.engine=vllm", "model.device=cpu"], 1, r"rollout\.engine=vllm"),
        (["rollout.engine=vllm", "rollout.pipeline_parallel=2"], 1, r"rollout\.pipeline_parallel"),
        (
            ["trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor_parallel=2"],
            0,
            r"trainer\.tensor_parallel=2",
        ),
        (["rollout.engine=vllm"], 1, ""),
        ([], 0, ""),
    ],
)
def test_routers_cannot_be_replayed_everywhere(given: list[str], gpus: int, refused: str) -> None:
    check_router_replay(float32_config("calculator-moe", given), 8, gpus)
    config = float32_config("calculator-moe", [*given, "trainer.router_replay=always"])
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_router_replay(config, 8, gpus)


def test_routers_of_a_dense_model_are_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.router_replay=always.*model\.path"):
        plan_here(float32_config("calculator", ["trainer.router_replay=always"]), tmp_path / "run")
    plan_here(float32_config("calculator-moe", ["trainer.router_replay=always"]), tmp_path / "run")


@pytest.mark.parametrize(
    ("preset", "replay", "gpus", "asks"),
    [
        ("calculator-moe", "auto", 1, True),
        ("calculator-moe", "never", 1, False),
        ("calculator-moe", "auto", 0, False),
        ("calculator", "auto", 1, False),
    ],
)
def test_engines_are_asked_for_experts_of_models_that_have_some(
    preset: str, replay: str, gpus: int, asks: bool, tmp_path: Path
) -> None:
    folder = [f"{key}={tmp_path}/m" for key in ("model.path", "warm_start.out")]
    config = float32_config(preset, [*folder, "rollout.engine=vllm", f"trainer.router_replay={replay}"])
    size = model_size(config)
    assert size is not None
    flags, [engine] = ENGINES["vllm"].route_flags, plan(config, tmp_path, size=size, gpus=gpus).engines
    assert flags and set(flags).issubset(engine.argv) == asks


def test_trackers_must_be_installed_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "wandb" else name)
    plan_here(float32_config("calculator", ["tracking.backends=[console,tensorboard]"]), tmp_path / "run")
    with pytest.raises(UserError, match=r"tracking\.backends: .*wandb"):
        plan_here(float32_config("calculator", ["tracking.backends=[console,wandb]"]), tmp_path / "run")


def test_peft_must_be_installed_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"trainer\.lora.*pip install 'rl-async\[lora\]'"):
        plan_here(float32_config("calculator", ["trainer.lora={}"]), tmp_path / "run")
    plan_here(float32_config("calculator", []), tmp_path / "run")


def test_kernels_must_be_installed_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "trainer.kernels=liger"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    config = float32_config("calculator", [key, "model.dtype=bfloat16"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=f"{key} .*GPU"):
        plan_here(config, tmp_path / "run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=f"{key}: .*pip install .*rl-async"):
        plan_here(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "gpus", "named"),
    [
        (["rollout.tensor_parallel=4"], 8, r"tensor_parallel=4 .* 9 attention heads"),
        (["rollout.tensor_parallel=3"], 2, r"tensor_parallel=3 .*3 GPUs.*only 2"),
        (["rollout.pipeline_parallel=8"], 8, r"pipeline_parallel=8: .*6 layers"),
        (["rollout.tensor_parallel=3", "rollout.pipeline_parallel=2"], 6, ""),
        (["rollout.tensor_parallel=3"], 0, ""),
        (["rollout.tensor_parallel=3", "model.device=cpu"], 2, ""),
    ],
)
def test_a_model_that_an_engines_ranks_cannot_divide_is_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], gpus: int, named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9, "num_hidden_layers": 6}))
    config = float32_config("calculator", [f"model.path={tmp_path}", "rollout.engine=vllm", *overrides])
    with pytest.raises(UserError, match=named) if named else nullcontext():
        check_engine_ranks(config, gpus)


def test_rows_that_ranks_cannot_share_are_refused_before_anything_starts(tmp_path: Path) -> None:
    warm = ["model.path=none", "warm_start.out=none", "trainer.ranks=3", "trainer.sequence_parallel=3"]
    with pytest.raises(UserError, match=r"sequence_parallel=3 .*model\.path=none: .*its 4 attention heads"):
        check_sharing(float32_config("calculator", warm))
    config = float32_config("calculator", [f"model.path={tmp_path}", "trainer.ranks=2", "trainer.sequence_parallel=2"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "stablelm", "num_attention_heads": 4}))
    with pytest.raises(UserError, match="cannot be packed: models of type stablelm"):
        check_sharing(config)
    file.write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 4}))
    check_sharing(config)


def test_ray_shows_an_engine_no_gpu_but_its_own() -> None:
    def check(*overrides: str, gpus: int = 2) -> None:
        check_opened(float32_config("calculator", ["rollout.engines=2", *overrides], mode="colocated"), gpus)

    with pytest.raises(UserError, match=r"^weight_sync\.transport=ipc"):
        check("trainer.ranks=2")
    check("trainer.ranks=2", "weight_sync.transport=disk")
    check("trainer.ranks=2", gpus=0)
    check("trainer.ranks=1", "rollout.engines=1")
