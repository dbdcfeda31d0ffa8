"""What is checked of this machine, and what is chosen for its processor: threads, and the type of the weights."""

import json
import re
import sys
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version as torch_version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rl_async.accelerators import count_gpus
from rl_async.configs.derived import adapter_way, resolve_transport
from rl_async.configs.engines import ENGINES, in_range
from rl_async.configs.load import dump, load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, UserError
from rl_async.launcher import machine_check as s
from rl_async.launcher.machine_check import RANGES, TRIED, untried
from rl_async.launcher.plan import machine
from rl_async.launcher.plan.machine import (
    SAVED_BYTES,
    SMALL,
    Choice,
    MachineRecord,
    Measure,
    Measured,
    ask_torch,
    check_disk,
    check_engine_ranks,
    check_engines,
    check_experts,
    check_logins,
    check_opened,
    check_router_replay,
    check_sharing,
    check_trackers,
    checkpoint_bytes,
    cores,
    layer_shape,
    plan_here,
    processor_name,
    read_machine,
    settle,
    settle_here,
    with_adapter_way,
    with_threads,
    with_weight_way,
    write_machine,
)
from rl_async.launcher.plan.memory import ModelSize, model_size
from rl_async.launcher.plan.planning import plan
from rl_async.launcher.run_folder import as_settled, differences
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


def test_engines_that_load_no_adapters_beside_experts_get_merged_weights() -> None:
    config = float32_config("calculator-moe", ["rollout.engine=vllm", "trainer.lora={}"])
    size = model_size(config)
    assert size is not None and adapter_way(config) == "load"
    assert adapter_way(with_adapter_way(config, size)) == "merge"
    for given in ("weight_sync.adapters=add", "rollout.engine=embedded"):
        other = float32_config("calculator-moe", ["rollout.engine=vllm", "trainer.lora={}", given])
        assert with_adapter_way(other, size) is other
    asked = float32_config("calculator-moe", ["rollout.engine=vllm", "trainer.lora={}", "weight_sync.adapters=load"])
    with pytest.raises(ConfigError, match=r"weight_sync\.adapters=load: rollout\.engine=vllm"):
        with_adapter_way(asked, size)
    assert with_adapter_way(asked, replace(size, experts=0)) is asked


MIB = 1 << 20


@pytest.mark.parametrize(
    ("given", "gpus", "one_host", "transport", "bucket"),
    [
        ([], 2, True, "ipc", 1024 * MIB),
        ([], 1, True, "ipc", 1024 * MIB),
        ([], 2, False, "nccl", 1024 * MIB),
        # NCCL refuses two ranks on one GPU.
        ([], 1, False, "nearest", None),
        ([], 0, True, "nearest", None),
        (["model.device=cpu"], 2, True, "nearest", None),
        (["weight_sync.way=gloo"], 2, True, "gloo", None),
        (["weight_sync.bucket_bytes=4096"], 2, True, "ipc", 4096),
        (["weight_sync.way=nccl"], 2, True, "nccl", 1024 * MIB),
        (["rollout.engine=sglang"], 2, True, "gloo", None),
        (["rollout.engine=sglang", "mode=colocated"], 1, True, "gloo", None),
        (["trainer.lend_devices=true"], 2, True, "nearest", None),
    ],
)
def test_weights_between_gpus_stay_on_them_in_large_buckets_unless_the_user_says_otherwise(
    given: list[str], gpus: int, one_host: bool, transport: str, bucket: int | None
) -> None:
    config = float32_config("calculator", [*given, "model.dtype=bfloat16"])
    before, size = MachineRecord("a processor", 2, None, Choice("bfloat16", "a test")), ModelSize(8 * 10**9, 1)
    found, told = with_weight_way(config, before, size, gpus, one_host=one_host)
    assert (resolve_transport(found), found.weight_sync.bucket_bytes) == (transport, bucket)
    assert (told.weights.startswith(f"weights: {transport}, ") and told.weights in told.lines) or transport == "gloo"
    assert with_weight_way(found, before, size, gpus, one_host=one_host)[0] == found


# Deltas of (1 engine + 2) * 0.2 GB of weights, times eight.
ROOM = 4_800_000_000


@pytest.mark.parametrize(
    ("given", "host_bytes", "options"),
    [
        ([], ROOM, ("staged", "delta")),
        ([], ROOM - 1, ()),
        ([], 0, ()),
        (["rollout.engines=2"], ROOM, ()),
        (["queue.max_staleness=0"], ROOM, ("delta",)),
        (["trainer.ranks=2"], ROOM, ("staged",)),
        (["trainer.learning_rate=1e-5"], ROOM, ("staged",)),
        (["model.dtype=float32"], 2 * ROOM, ("staged",)),
        (["trainer.lora={}"], ROOM, ()),
        (["rollout.engine=sglang"], ROOM, ()),
        (["weight_sync.way=nearest"], ROOM, ()),
        (["weight_sync.way=waves", "rollout.engines=2"], 2 * ROOM, ("waves",)),
        (["mode=colocated"], ROOM, ()),
    ],
)
def test_engines_keep_copies_between_machines_only_where_there_is_ample_memory(
    given: list[str], host_bytes: int, options: tuple[str, ...]
) -> None:
    usual = ["model.dtype=bfloat16", "queue.max_staleness=1", "trainer.learning_rate=1e-6"]
    config = float32_config("calculator", [*usual, *given])
    before, size = MachineRecord("a processor", 2, None, Choice("bfloat16", "a test")), ModelSize(10**8, 1)
    found, told = with_weight_way(config, before, size, 0, one_host=False, host_bytes=host_bytes)
    assert found.weight_sync.options == options
    assert all(option in told.weights for option in options) or config.weight_sync.way != "auto"
    assert with_weight_way(config, before, size, 0, one_host=True, host_bytes=host_bytes)[0].weight_sync.options == (
        config.weight_sync.options
    )


@pytest.mark.parametrize(("parameters", "bucket"), [(10**6, 64 * MIB), (8 * 128 * MIB // 2, 128 * MIB)])
def test_a_bucket_between_gpus_is_an_eighth_of_the_weights(parameters: int, bucket: int) -> None:
    config = float32_config("calculator", ["model.dtype=bfloat16"], mode="colocated")
    before = MachineRecord("a processor", 2, None, Choice("bfloat16", "a test"))
    found, _ = with_weight_way(config, before, ModelSize(parameters, 1), 1, one_host=True)
    assert (found.weight_sync.transport, found.weight_sync.bucket) == ("ipc", bucket)


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
    with pytest.raises(UserError, match="read images"):
        check_sharing(float32_config("calculator", [*warm, "warm_start.vision=true"]))
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

    with pytest.raises(UserError, match=r"^weight_sync\.way=ipc"):
        check("trainer.ranks=2")
    check("trainer.ranks=2", "weight_sync.way=disk")
    check("trainer.ranks=2", gpus=0)
    check("trainer.ranks=1", "rollout.engines=1")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no variable of the tests' own environment choose the threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


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
    config = float32_config("calculator", [f"trainer.ranks={ranks}"], mode=mode)
    assert config.launcher.threads is None
    assert with_threads(config, LARGE, available, engine_ranks=engines).launcher.threads == threads
    assert with_threads(config, None, available, engine_ranks=engines).launcher.threads == threads


def test_small_models_and_what_is_set_are_left_alone() -> None:
    small = ModelSize(parameters=SMALL - 1, kv_per_token=1)
    assert with_threads(float32_config("calculator"), small, 64, engine_ranks=1).launcher.threads == 1
    config = float32_config("calculator", ["launcher.threads=3"])
    assert with_threads(config, LARGE, 64, engine_ranks=1) is config


def test_threads_are_those_of_the_plan_and_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("rl_async.launcher.plan.machine.cores", lambda: 12.0)
    config = float32_config("calculator", ["warm_start.hidden_size=512", "warm_start.layers=8"], mode="colocated")
    planned = plan_here(config, tmp_path / "run")
    assert {spec.env["OMP_NUM_THREADS"] for spec in (*planned.engines, *planned.trainers)} == {"12"}
    _, machine = settle_here(config, None)
    assert machine.threads == 12
    assert any("12" in line and "launcher.threads" in line for line in machine.lines)


def test_the_users_number_of_threads_is_respected() -> None:
    config = float32_config("calculator")

    def threads(value: str, config: RunConfig = config) -> int | None:
        return with_threads(config, LARGE, 64, engine_ranks=1, environment={"OMP_NUM_THREADS": value}).launcher.threads

    assert threads("3") == 3
    assert threads("5,2") == 5
    assert threads("") == 32
    assert threads("3", float32_config("calculator", ["launcher.threads=7"])) == 7
    for value in ("many", "0", "-1", "1.5"):
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
            threads(value)


def test_cores_are_those_of_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cores(tmp_path) == min(1.5, cores(tmp_path / "none"))


def test_quotas_of_the_first_version_of_cgroups_count(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    assert cores(tmp_path) == 0.5
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores(tmp_path) == cores(tmp_path / "none")


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    none = tmp_path / "none"
    assert cores(none, tmp_path, range(8)) == 4
    assert cores(none, tmp_path, [0, 4]) == 1
    assert cores(none, tmp_path, [0, 1, 5]) == 2
    assert cores(none, none, range(8)) == 8


SLOW_BFLOAT16 = Measured("2.13.0", {"float32": 43.0, "bfloat16": 1.2})
FAST_BFLOAT16 = Measured("2.13.0", {"float32": 100.0, "bfloat16": 310.0})
NEW_GPU = Measured("2.13.0", accelerator="NVIDIA H200", has_bfloat16=True)
OLD_GPU = Measured("2.13.0", accelerator="Tesla V100", has_bfloat16=False)


def config_of(folder: Path, *overrides: str, hidden: int = 2048, mlp: int = 8192) -> RunConfig:
    """The config of a run on a model of these sizes, with more parameters than ``SMALL`` by default."""
    shape = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 4, "vocab_size": 1000}
    (folder / "config.json").write_text(json.dumps(shape))
    return load_config(None, [f"model.path={folder}", "data.path=none", *overrides])


def measuring(found: Measured, asked: list[tuple[str, tuple[int, int], int]]) -> Measure:
    def measure(device: str, shape: tuple[int, int], threads: int) -> Measured:
        asked.append((device, shape, threads))
        return found

    return measure


@pytest.mark.parametrize(
    ("found", "gpus", "chosen"),
    [
        (SLOW_BFLOAT16, 0, "float32"),
        (FAST_BFLOAT16, 0, "bfloat16"),
        (NEW_GPU, 1, "bfloat16"),
        (OLD_GPU, 1, "float32"),
        (SLOW_BFLOAT16, 1, "float32"),  # the file of a GPU is there, and torch finds none
    ],
)
def test_the_machine_chooses_the_faster_type(found: Measured, gpus: int, chosen: str, tmp_path: Path) -> None:
    asked: list[tuple[str, tuple[int, int], int]] = []
    config, choice = settle(config_of(tmp_path), gpus, 2, measuring(found, asked))
    assert config.model.dtype == choice.dtype == chosen and choice.by == "machine"
    devices = ["auto"] * bool(gpus) + ["cpu"] * (not found.accelerator)
    assert asked == [(device, (2048, 8192), 2) for device in devices]
    assert chosen in choice.line and "model.dtype" in choice.line


def test_small_models_and_given_types_are_not_measured(tmp_path: Path) -> None:
    def never(device: str, shape: tuple[int, int], threads: int) -> Measured:
        raise AssertionError("measured")

    for gpus in (0, 1):
        config, choice = settle(load_config("calculator"), gpus, 1, never)
        assert config.model.dtype == "float32" and choice.by == "machine"
    config, choice = settle(config_of(tmp_path, "model.dtype=bfloat16"), 0, 1, never)
    assert config.model.dtype == "bfloat16" and choice.by == "config"


def test_a_run_on_the_cpu_of_a_machine_with_gpus_is_measured_there(tmp_path: Path) -> None:
    asked: list[tuple[str, tuple[int, int], int]] = []
    settle(config_of(tmp_path, "model.device=cpu"), 8, 4, measuring(FAST_BFLOAT16, asked))
    assert [device for device, _, _ in asked] == ["cpu"]


def test_quantised_engines_restrict_the_choice(tmp_path: Path) -> None:
    given = ["rollout.engine=vllm", "rollout.quantization=fp8"]
    config, _ = settle(config_of(tmp_path, *given), 0, 1, measuring(SLOW_BFLOAT16, []))
    assert config.model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        config_of(tmp_path, *given, "model.dtype=float32")
    config, _ = settle(config_of(tmp_path, "rollout.quantization=fp8"), 0, 1, measuring(SLOW_BFLOAT16, []))
    assert config.model.dtype == "float32"


def test_a_resumed_run_keeps_its_type_and_says_that_another_would_be_chosen(tmp_path: Path) -> None:
    _, first = settle(config_of(tmp_path), 0, 2, measuring(SLOW_BFLOAT16, []))
    assert first.dtype == "float32" and not first.here
    for given in ("auto", "float32"):
        resumed = config_of(tmp_path, f"model.dtype={given}")
        config, same = settle(resumed, 0, 2, measuring(SLOW_BFLOAT16, []), first)
        assert config.model.dtype == "float32" and same.here and "bfloat16" not in same.line
        config, other = settle(resumed, 0, 2, measuring(FAST_BFLOAT16, []), first)
        assert config.model.dtype == "float32" and "bfloat16" in other.line
        assert (other.why, other.measured, other.by) == (first.why, first.measured, "machine")
    config, changed = settle(config_of(tmp_path, "model.dtype=bfloat16"), 0, 2, measuring(SLOW_BFLOAT16, []), first)
    assert config.model.dtype == "bfloat16" and changed.by == "config"


def test_a_run_is_resumed_where_torch_cannot_be_asked(tmp_path: Path) -> None:
    def fails(device: str, shape: tuple[int, int], threads: int) -> Measured:
        raise UserError("no answer")

    _, first = settle(config_of(tmp_path), 0, 2, measuring(SLOW_BFLOAT16, []))
    config, choice = settle(config_of(tmp_path), 0, 2, fails, first)
    assert config.model.dtype == "float32" and "no answer" in choice.line
    with pytest.raises(UserError, match="no answer"):
        settle(config_of(tmp_path), 0, 2, fails)


def test_a_type_that_was_set_by_hand_differs_from_auto_and_one_that_was_chosen_does_not(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    given = config_of(model)
    for dtype in ("float32", "auto"):
        kept, choice = settle(config_of(model, f"model.dtype={dtype}"), 0, 2, measuring(SLOW_BFLOAT16, []))
        write_machine(run, MachineRecord("AMD EPYC", 2.0, 2, choice))
        assert differences(kept, as_settled(given, run)) == (["model.dtype"] if dtype == "float32" else [])


def test_a_way_of_weights_that_the_machine_chose_does_not_differ_from_auto(tmp_path: Path) -> None:
    given = float32_config("calculator")
    record = MachineRecord("AMD EPYC", 2.0, 2, Choice("float32", "a test", by="config"))
    kept, record = with_weight_way(given, record, ModelSize(8 * 10**9, 1), 2, one_host=True)
    write_machine(tmp_path, record)
    (tmp_path / "config.yaml").write_text(dump(kept))
    assert differences(kept, as_settled(given, tmp_path)) == []
    other = float32_config("calculator", ["weight_sync.way=disk"])
    assert differences(kept, as_settled(other, tmp_path)) == ["weight_sync.way"]


def test_the_record_of_a_run_is_read_as_written_and_damage_is_named(tmp_path: Path) -> None:
    assert read_machine(tmp_path) is None
    _, choice = settle(config_of(tmp_path), 0, 2, measuring(FAST_BFLOAT16, []))
    record = MachineRecord("AMD EPYC", 2.0, 2, choice)
    write_machine(tmp_path, record)
    assert read_machine(tmp_path) == record
    (tmp_path / "machine.json").write_text('{"processor": 1}')
    with pytest.raises(UserError, match=r"machine\.json"):
        read_machine(tmp_path)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"hidden_size": 8, "intermediate_size": 24}, (8, 24)),
        ({"hidden_size": 8, "intermediate_size": 24, "moe_intermediate_size": 4}, (8, 4)),
        ({"text_config": {"hidden_size": 16, "intermediate_size": 48}}, (16, 48)),
        ({"hidden_size": 8}, None),
        ({}, None),
    ],
)
def test_the_sizes_of_a_layer_are_the_models(shape: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert layer_shape(config) == expected


def test_a_name_of_the_processor_is_optional(tmp_path: Path) -> None:
    (tmp_path / "arm").write_text("processor: 0\nBogoMIPS: 50\n")
    (tmp_path / "x86").write_text("processor: 0\nmodel name\t: AMD EPYC 7B13\n")
    assert [processor_name(tmp_path / name) for name in ("arm", "x86", "none")] == ["", "AMD EPYC 7B13", ""]


def test_a_config_that_is_no_object_is_refused_by_its_path(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(UserError, match=r"config\.json"):
        layer_shape(config)


def test_torch_answers_with_rates_of_both_types() -> None:
    found = ask_torch("cpu", (64, 192), 1)
    # The package index's builds for CUDA have a local label, such as +cu130, in torch alone.
    assert found.torch.partition("+")[0] == torch_version("torch").partition("+")[0] and not found.accelerator
    assert set(found.rates) == {"float32", "bfloat16"}


def test_a_failed_question_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(UserError, match=r"model\.dtype"):
        ask_torch("cpu", (64, 192), 1)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory and home without logins, and no packages but those in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SWANLAB_API_KEY", "SWANLAB_ROOT", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])


def config(*overrides: str) -> RunConfig:
    return load_config("calculator", list(overrides))


@pytest.mark.usefixtures("alone")
def test_a_tracker_is_a_package_and_not_the_folder_of_its_runs() -> None:
    online = config("tracking.backends=[console,jsonl,wandb]")
    with pytest.raises(UserError, match=r"^tracking\.backends: .*wandb"):
        check_trackers(online)
    Path("wandb").mkdir()
    with pytest.raises(UserError, match=r"^tracking\.backends: .*wandb"):
        check_trackers(online)
    Path("wandb/__init__.py").touch()
    check_trackers(online)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_only_a_tracker_that_goes_online_needs_a_login(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = f"tracking.backends=[console,{name}]"
    check_logins(config(backends))
    check_logins(config("tracking.offline=false", "tracking.backends=[console]"))
    with pytest.raises(ConfigError, match=rf"^tracking\.offline=false: {name}"):
        check_logins(config(backends, "tracking.offline=false"))
    monkeypatch.setenv(f"{name.upper()}_API_KEY", "secret")
    check_logins(config(backends, "tracking.offline=false"))


@pytest.mark.usefixtures("alone")
def test_the_logins_that_the_trackers_keep_in_files_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = config("tracking.backends=[wandb]", "tracking.offline=false")
    Path(".netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_logins(wandb)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8443")
    with pytest.raises(ConfigError, match="wandb"):
        check_logins(wandb)
    Path("mine").write_text("machine wandb.example.org login user password secret\n")
    monkeypatch.setenv("NETRC", "mine")
    check_logins(wandb)
    monkeypatch.delenv("WANDB_BASE_URL")
    with pytest.raises(ConfigError, match="wandb"):
        check_logins(wandb)
    Path(".config/wandb").mkdir(parents=True)
    Path(".config/wandb/settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    check_logins(wandb)
    Path(".swanlab").mkdir()
    Path(".swanlab/.netrc").touch()
    check_logins(config("tracking.backends=[swanlab]", "tracking.offline=false"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("steps", "every", "keep", "there", "count"),
    [(50, 10, 2, 0, 3), (50, 10, 2, 2, 1), (50, 10, 2, 3, 1), (50, 0, 2, 0, 1), (11, 10, 5, 0, 2), (5, 10, 5, 0, 1)],
)
def test_checkpoints_that_are_kept_at_once_are_counted(
    steps: int, every: int, keep: int, there: int, count: int, tmp_path: Path
) -> None:
    for step in range(there):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").touch()
    own = config(f"trainer.steps={steps}", f"trainer.checkpoint_every={every}", f"trainer.keep_checkpoints={keep}")
    size = ModelSize(parameters=100, kv_per_token=1, critic=10)
    assert checkpoint_bytes(own, tmp_path, size) == count * 110 * SAVED_BYTES
    assert checkpoint_bytes(own, tmp_path, None) == 0
    assert checkpoint_bytes(config("trainer.lora={}"), tmp_path, size) == 0


@pytest.mark.usefixtures("alone")
def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    check_disk(config(), tmp_path / "runs" / "a", ModelSize(parameters=1, kv_per_token=1))
    with pytest.raises(UserError, match=r"^launcher\.run_dir: "):
        check_disk(config(), tmp_path / "runs" / "a", ModelSize(parameters=1 << 60, kv_per_token=1))


# What is said of a machine; what must be there, and what would only be better.


ROOT = Path(__file__).parents[4]
HERE = {"python": "3.11.9", "torch": "2.13.0+cpu", "transformers": "5.24.1", "vllm": "", "sglang": ""}


def levels(lines: list[s.Finding]) -> list[str]:
    return [line.level for line in lines]


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("5.0.0rc1", ">=5", True),
        ("0.32.7", "==0.32.*", True),
        ("0.33.0", "==0.32.*", False),
        ("0.33.1", ">=0.32,<0.34", True),
        ("0.34.0", ">=0.32,<0.34", False),
        ("0.31.0", ">=0.32,<0.34", False),
        ("0.5.23", "==0.5.23", True),
        ("0.5.2", "==0.5.23", False),
        ("0.5.23.1", "==0.5.23", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, wanted: str, fits: bool) -> None:
    assert in_range(version, wanted) is fits


def requirements() -> dict[str, str]:
    """Every range of pyproject.toml, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    parted = (re.fullmatch(r"([\w.-]+)(?:\[.*\])?([^;]*)(?:;.*)?", line) for line in lines)
    return {match[1]: match[2].strip() for match in parted if match} | {"python": project["requires-python"]}


def test_the_ranges_are_those_of_pyproject() -> None:
    assert requirements().items() >= RANGES.items()


def test_what_was_run_is_within_the_ranges_and_what_is_pinned_was_run() -> None:
    ranges = requirements()
    for name, trials in TRIED.items():
        assert all(in_range(trial.version, ranges[name]) for trial in trials if name in ranges), name
    files = ("constraints.txt", "scripts/install")
    pins = [pin for file in files for pin in re.findall(r"^[^#\n]*?\b([\w-]+)==([\w.]+)", words(file), re.MULTILINE)]
    builds = {build: traits.package for traits in ENGINES.values() for build in traits.builds}
    seen = set()
    for name, version in pins:
        name = builds.get(name, name)
        if name in TRIED:
            seen.add(name)
            assert version in {trial.version for trial in TRIED[name]}, f"{name}=={version}"
    # pyproject.toml pins these two to one version each.
    assert seen >= TRIED.keys() - {"python", "sglang", "megatron-core"}


def words(file: str) -> str:
    """A file's text with each word on a line of its own, without comments."""
    lines = (line.partition("#")[0] for line in (ROOT / file).read_text().splitlines())
    return "\n".join(" ".join(lines).replace('"', " ").split())


def test_a_package_is_ok_too_old_or_missing() -> None:
    assert levels(s.package_lines(s.Probe(HERE), ("torch", "transformers"), "here")) == ["ok", "ok"]
    old = s.package_lines(s.Probe(HERE | {"torch": "2.4.0"}), ("torch", "vllm"), "here")
    assert levels(old) == ["warning", "missing"]
    assert "rl-async[vllm]" in old[1].what_to_do
    (broken,) = s.package_lines(s.Probe({"error": "no libfoo"}), ("torch",), "here")
    assert broken.text == "missing  torch cannot be imported here: no libfoo; pip install -e ."
    (broken,) = s.package_lines(s.Probe({"error": "no such file"}), ("vllm",), "in /no/python")
    assert "in /no/python: no such file; give a Python" in broken.text and "rollout.python" in broken.text


def test_versions_that_were_never_run_are_warned_of_by_series() -> None:
    probe = s.Probe(HERE | {"torch": "2.99.0", "transformers": "5.0.1"})
    new = s.package_lines(probe, ("torch", "transformers"), "here")
    assert levels(new) == ["warning", "warning"] and "2.99.0" in new[0].what and "5.0.1" in new[1].what
    assert s.untried_lines(s.Probe(HERE)) == []
    others = HERE | {"python": "3.99.1", "peft": "99.0", "ray": ""}
    named = [line.what.split()[:2] for line in s.untried_lines(s.Probe(others))]
    assert named == [["python", "3.99.1"], ["peft", "99.0"]]
    assert untried("sglang", "0.5.24") and not untried("sglang", "0.5.23") and not untried("unheard-of", "1")


def test_engines_that_a_replay_does_not_start_need_nothing() -> None:
    many = ["rollout.engines=8", "agent.workers=8"]
    replay = float32_config("calculator", [*many, "rollout.replay=runs/before"])
    fewest = float32_config("calculator", ["rollout.engines=1", "agent.workers=1"])
    assert s.needed_bytes(replay) < s.needed_bytes(fewest) < s.needed_bytes(float32_config("calculator", many))
    vllm = ["rollout.engine=vllm", "rollout.replay=runs/before"]
    assert "missing" not in levels(s.engine_lines(s.Probe(HERE), load_config("calculator", vllm)))


def test_megatron_is_missing_only_for_a_trainer_that_uses_it() -> None:
    config = load_config("calculator", ["trainer.backend=megatron"])
    assert levels(s.backend_lines(config, installed=False)) == ["missing"]
    assert levels(s.backend_lines(config, installed=True)) == ["ok"]
    assert s.backend_lines(load_config("calculator"), installed=False) == s.backend_lines(None, installed=False) == []


def test_devices_are_missing_only_where_they_are_asked_for() -> None:
    cuda = load_config("calculator", ["model.device=gpu"])
    assert levels(s.device_lines(s.Probe(HERE), 0, None)) == ["ok"]
    assert levels(s.device_lines(s.Probe(HERE), 0, cuda)) == ["missing"]
    assert levels(s.device_lines(s.Probe(HERE), 2, None)) == ["warning"]
    assert levels(s.device_lines(s.Probe(HERE, ["H200"], "NCCL 2.27.5"), 1, cuda)) == ["ok", "ok"]
    several = load_config("calculator", ["rollout.engine=vllm", "rollout.tensor_parallel=2"])
    assert levels(s.device_lines(s.Probe(HERE, ["H200"], "NCCL 2.27.5"), 1, several)) == ["missing", "ok"]
    assert levels(s.device_lines(s.Probe(HERE, ["H200"] * 2, "NCCL 2.27.5"), 2, several)) == ["ok", "ok"]
    assert levels(s.device_lines(s.Probe(HERE, ["H200"] * 2), 2, several)) == ["ok", "warning"]


def test_an_engine_must_be_there_if_the_config_wants_it() -> None:
    assert levels(s.engine_lines(s.Probe(HERE), None)) == ["ok", "ok"]
    wants = load_config("calculator", ["rollout.engine=vllm"])
    assert sorted(levels(s.engine_lines(s.Probe(HERE), wants))) == ["missing", "ok"]
    assert levels(s.engine_lines(s.Probe(HERE | {"vllm": "0.32.1"}), wants)) == ["ok", "ok"]


def test_a_python_that_cannot_be_run_is_an_answer() -> None:
    assert "/no/such/python" in s.probe("/no/such/python").versions["error"]


def test_memory_and_cores_are_those_of_the_cgroup(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 9 kB\nMemAvailable: 4194304 kB\n")
    assert s.available_bytes(tmp_path, info) == 4 << 30
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    assert s.available_bytes(tmp_path, info) == 2 << 30
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert s.cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert s.cores(tmp_path) >= 1


def test_what_is_small_is_a_warning_with_a_way_out() -> None:
    for line in (s.memory_line(1 << 30, 2 << 30), s.cores_line(1), s.shm_line(64 << 20), s.files_line(256, 4096)):
        assert line.level == "warning" and line.what_to_do
    assert "ulimit -n 4096" in s.files_line(256, 4096).text
    assert s.ports_line(3).level == "missing" and s.ports_line(s.PORTS).level == "ok"


def test_redis_is_looked_for_only_if_the_journal_is_there() -> None:
    assert s.redis_lines(load_config("calculator", []), None) == []
    wants = load_config("calculator", ["queue.journal=redis", "queue.redis.url=redis://127.0.0.1:1/0"])
    assert s.redis_lines(wants, None)[0].what_to_do == "install redis-server and start it"


def test_the_choice_for_a_config_and_for_a_model_of_usual_size_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config, lines = s.settled(load_config("calculator"))
    assert config is not None and config.model.dtype == "float32" and set(levels(lines)) == {"ok"}
    assert any("float32" in line.what and "model.dtype" in line.what for line in lines)
    assert any("launcher.threads" in line.what for line in lines)
    config, lines = s.settled(None)
    assert config is None and any("GFLOP/s" in line.what for line in lines)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    config, lines = s.settled(load_config("calculator-moe", ["warm_start.hidden_size=2048"]))
    assert config is not None and config.model.dtype == "float32" and levels(lines) == ["missing"]
