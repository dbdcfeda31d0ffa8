"""Who has how much of a device, and what engines are told of it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_async.errors import UserError
from rl_async.launcher.plan.memory import CONTEXT_BYTES, STAGES, ModelSize, decoding_bytes, trainer_bytes
from rl_async.launcher.plan.planning import Plan, plan
from rl_async.launcher.runs.launch import memory_tables
from rl_async.process.run_files import DeviceBudget, Holder, MemoryBudget, Part, Stage, read_budget, write_budget
from tests.support.configs import float32_config

RUN = Path("runs/x")
GIB = 1 << 30
SIZE = ModelSize(parameters=GIB, kv_per_token=1 << 16, activations=1 << 10, vocab=1000, head=1 << 20, layer=1 << 10)
GPU = ["rollout.engine=vllm", "rollout.max_batch_size=64", "rollout.max_model_len=4096", "model.dtype=bfloat16"]


def planned(*overrides: str, mode: str = "colocated", **options: Any) -> Plan:
    return plan(float32_config("calculator", [*GPU, *overrides], mode=mode), RUN, size=SIZE, **options)


def the(found: Plan, role: str) -> tuple[DeviceBudget, Holder]:
    return next((d, h) for d in found.memory.devices for h in d.holders if h.role == role)


def test_who_takes_turns_on_a_gpu_has_it_alone_but_for_the_runtime() -> None:
    found = planned(gpus=1)
    (_, engine), (_, trainer) = the(found, "engine"), the(found, "trainer")
    for stage in ("train", "gather"):
        assert engine.stages[stage] == {"runtime": CONTEXT_BYTES}
    away = {"runtime": CONTEXT_BYTES, "bucket": 2 * 64 << 20}  # which engines have mapped
    assert trainer.stages["rollout"] == away
    assert trainer.stages["load"] == away | {"published": 2 * GIB}, "until caches wake"
    assert [stage for stage in STAGES if "published" in trainer.stages[stage]] == ["gather", "load"]
    cache = 64 * 4096 * (1 << 16) * 2
    assert engine.stages["rollout"]["KV cache"] == engine.stages["start"]["KV cache"] == cache
    assert "KV cache" not in engine.stages["load"] and engine.stages["load"]["bucket"] == 64 << 20
    assert {"optimizer", "gradients", "activations"} <= trainer.stages["train"].keys()
    assert "optimizer" not in trainer.stages["start"], "AdamW makes its moments in the first step"


def test_what_waits_for_engines_is_each_ranks_share_or_on_the_host() -> None:
    two = the(planned("trainer.ranks=2", gpus=2), "trainer")[1]
    assert two.stages["load"]["published"] == GIB
    on_the_host = the(planned("weight_sync.transport=disk", gpus=1), "trainer")[1]
    assert on_the_host.stages["load"] == {"runtime": CONTEXT_BYTES}
    assert "published" not in on_the_host.stages["gather"]
    gathered = the(planned("weight_sync.delta=true", gpus=1), "trainer")[1]
    assert gathered.stages["gather"]["published"] == 2 * GIB and "published" not in gathered.stages["load"]


def test_megatron_asleep_leaves_weights_on_the_device() -> None:
    found = the(planned("trainer.backend=megatron", gpus=1), "trainer")[1]
    assert found.stages["load"]["weights"] == found.stages["rollout"]["weights"] == 2 * GIB
    assert found.stages["load"]["reference"] == found.stages["train"]["reference"]
    assert found.stages["gather"]["gradients"] == found.stages["train"]["gradients"], "until it sleeps"
    assert "gradients" not in found.stages["load"]


def test_engines_of_different_kinds_share_what_is_left_in_the_stage_that_has_least() -> None:
    found = planned("rollout.engine=[embedded, vllm]", "rollout.engines=2", gpus=1, capacity=60 * GIB)
    (device,) = found.memory.devices
    engines = [holder for holder in device.holders if holder.role == "engine"]
    assert ["KV cache" in engine.stages["start"] for engine in engines] == [False, True]
    caches = [engine.stages["rollout"]["KV cache"] for engine in engines]
    assert caches[0] == caches[1] < 64 * 4096 * (1 << 16) * 2
    assert max(map(device.total, STAGES)) <= (device.limit or 0) < max(map(device.total, STAGES)) + 2


def test_an_engine_has_a_context_on_each_gpu_from_which_it_takes_weights() -> None:
    found = planned("trainer.ranks=2", "rollout.engines=2", gpus=2)
    assert the(found, "engine")[1].stages["train"] == {"runtime": 2 * CONTEXT_BYTES}
    on_the_host = planned("trainer.ranks=2", "rollout.engines=2", "weight_sync.transport=disk", gpus=2)
    assert the(on_the_host, "engine")[1].stages["train"] == {"runtime": CONTEXT_BYTES}


def test_what_does_not_take_turns_is_always_there() -> None:
    found = planned(mode="disaggregated", gpus=2)
    (device, engine), (_, trainer) = the(found, "engine"), the(found, "trainer")
    assert all("KV cache" in engine.stages[stage] for stage in STAGES)
    step = trainer.stages["train"]
    assert trainer.stages["rollout"] == trainer.stages["load"] == step, "torch keeps what a step took"
    assert trainer.total("gather") >= trainer.total("train")
    assert device.holders == (engine,), "each has a GPU of its own"


def test_the_cache_shrinks_to_what_the_others_leave() -> None:
    capacity = 40 * GIB
    found = planned(gpus=1, capacity=capacity)
    device, engine = the(found, "engine")
    assert device.limit == 36 * GIB
    wanted = the(planned(gpus=1), "engine")[1].stages["rollout"]["KV cache"]
    assert engine.stages["rollout"]["KV cache"] < wanted
    assert 0 <= device.limit - max(device.total("start"), device.total("rollout")) < 8
    alone = planned(mode="disaggregated", gpus=2, capacity=capacity)
    assert the(alone, "engine")[1].stages["rollout"]["KV cache"] > engine.stages["rollout"]["KV cache"]


def flags(found: Plan) -> dict[str, str]:
    argv = found.engines[0].argv
    names = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--mem-fraction-static", "--cache-bytes")
    return {name: argv[argv.index(name) + 1] for name in names if name in argv}


def test_vllm_gets_its_share_of_a_gpu_that_it_shares_and_finds_its_own_elsewhere() -> None:
    capacity = 40 * GIB
    shared = planned(gpus=1, capacity=capacity)
    engine = the(shared, "engine")[1]
    assert int(flags(shared)["--kv-cache-memory-bytes"]) == engine.stages["rollout"]["KV cache"]
    share = float(flags(shared)["--gpu-memory-utilization"])
    assert engine.total("rollout") <= share * capacity <= engine.total("rollout") + capacity / 1e4
    assert flags(planned(mode="disaggregated", gpus=2, capacity=capacity)) == {}
    given = planned("rollout.cache_bytes=5000000000", mode="disaggregated", gpus=2, capacity=capacity)
    assert flags(given)["--kv-cache-memory-bytes"] == "5000000000"
    assert flags(planned(gpus=1)) == {"--kv-cache-memory-bytes": str(64 * 4096 * (1 << 17))}, "capacity unknown"
    assert flags(planned()) == {"--kv-cache-memory-bytes": str(GIB)}, "on a CPU"


def test_the_other_kinds_get_theirs() -> None:
    embedded = planned("rollout.engine=embedded", mode="disaggregated", gpus=2, capacity=40 * GIB)
    assert int(flags(embedded)["--cache-bytes"]) == the(embedded, "engine")[1].stages["rollout"]["KV cache"]
    sglang = planned("rollout.engine=sglang", mode="disaggregated", gpus=1, capacity=60 * GIB)
    engine = the(sglang, "engine")[1].stages["rollout"]
    share = float(flags(sglang)["--mem-fraction-static"])
    assert share == pytest.approx((engine["weights"] + engine["KV cache"]) / (60 * GIB), abs=1e-4)


@pytest.mark.parametrize(("engine", "at_first"), [("embedded", 2 * GIB), ("vllm", 3 * GIB // 2)])
def test_quantised_weights_leave_room_and_the_embedded_engine_loads_them_in_full(engine: str, at_first: int) -> None:
    size = replace(SIZE, matrices=GIB // 2)

    def stages(*more: str) -> Mapping[Stage, Mapping[Part, int]]:
        config = float32_config("calculator", [*GPU, f"rollout.engine={engine}", *more], mode="colocated")
        return the(plan(config, RUN, size=size, gpus=1, capacity=40 * GIB), "engine")[1].stages

    plain, quantised = stages(), stages("rollout.quantization=int8")
    assert quantised["rollout"]["weights"] == quantised["load"]["weights"] == 3 * GIB // 2
    assert quantised["load"]["bucket"] == plain["load"]["bucket"], "weights travel in full"
    assert quantised["start"]["weights"] == at_first
    assert quantised["rollout"]["KV cache"] == plain["rollout"]["KV cache"] + GIB // 2


def test_each_rank_of_an_engine_has_its_part_on_its_own_gpu() -> None:
    one, two = (planned(*more, gpus=2) for more in ([], ["rollout.tensor_parallel=2"]))
    assert [len(device.holders) for device in two.memory.devices] == [2, 1]
    parts, whole = the(two, "engine")[1].stages["rollout"], the(one, "engine")[1].stages["rollout"]
    assert (parts["weights"], parts["KV cache"]) == (whole["weights"] // 2, whole["KV cache"] // 2)
    config = float32_config("calculator", [*GPU, "rollout.tensor_parallel=2"])
    assert parts["activations"] == decoding_bytes(config, SIZE)


@pytest.mark.parametrize(("engine", "kept"), [("embedded", {"runtime"}), ("vllm", {"runtime", "weights", "KV cache"})])
def test_on_a_cpu_only_the_embedded_engine_frees_memory_and_the_trainer_none(engine: str, kept: set[str]) -> None:
    found = planned(f"rollout.engine={engine}", capacity=100 * GIB)
    [device] = found.memory.devices
    assert the(found, "engine")[1].stages["train"].keys() == kept
    trainer = the(found, "trainer")[1]
    assert {"weights", "optimizer", "published"} <= trainer.stages["rollout"].keys()
    assert not {"gradients", "activations"} & trainer.stages["rollout"].keys()
    estimate = trainer_bytes(float32_config("calculator", GPU), SIZE)
    assert estimate is not None
    assert trainer.total("train") == estimate + trainer.stages["train"]["published"]
    assert device.total("train") == sum(holder.total("train") for holder in device.holders)


@pytest.mark.parametrize(
    ("overrides", "capacity", "named"),
    [
        ([], 16 * GIB, ["'train'", "trainer-0", "trainer.ranks", "launcher.device_memory"]),
        (
            ["trainer.max_tokens_per_microbatch=40000000", "data.train_batch_groups=2400"],
            60 * GIB,
            ["'train'", "trainer.max_tokens_per_microbatch"],
        ),
        (["rollout.cache_bytes=40000000000"], 30 * GIB, ["engine-0", "rollout.cache_bytes"]),
        (
            ["trainer.cpu_offload=true", "model.device=gpu", "trainer.lora={}"],
            6 * GIB,
            ["'load'", "engine-0", "rollout.tensor_parallel", "trainer-0", "trainer.ranks", "weight_sync.transport"],
        ),
        (
            ["launcher.device_memory=0.1"],
            60 * GIB,
            ["rollout.max_model_len=4096", "engine-0", "rollout.tensor_parallel"],
        ),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_the_key_to_change(
    overrides: list[str], capacity: int, named: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        planned(*overrides, gpus=1, capacity=capacity)
    assert not [word for word in named if word not in str(caught.value)], caught.value


def test_the_table_has_every_stage_and_the_budget_survives_its_file(tmp_path: Path) -> None:
    found = planned("rollout.engines=2", "trainer.ranks=2", gpus=2, capacity=60 * GIB)
    [table] = memory_tables(found.memory)
    assert table.title is not None and "gpu:0, gpu:1" in str(table.title)
    assert [cell for cell in table.columns[0].cells if cell] == list(STAGES)
    write_budget(tmp_path, found.memory)
    assert read_budget(tmp_path) == found.memory
    assert read_budget(tmp_path / "none") == MemoryBudget()
    assert found.memory.of("trainer-1") is not None and found.memory.of("trainer-2") is None


def test_a_lent_engine_takes_turns_with_the_trainer_and_the_others_do_not() -> None:
    found = planned("trainer.lend_devices=true", mode="disaggregated", gpus=2, capacity=40 * GIB)
    first, second = found.memory.devices
    trainer, lent = first.holders
    assert (trainer.process, lent.process) == ("trainer-0", "lent-0")
    assert lent.stages["train"].keys() == trainer.stages["rollout"].keys() == {"runtime"}
    assert [holder.process for holder in second.holders] == ["engine-0"]
    shares = ["--gpu-memory-utilization" in engine.argv for engine in found.engines]
    assert shares == [False, True]
