"""The memory of each role, and the budget of a run's devices by stage."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, DeepseekV3Config

from rl_async.configs.load import load_config
from rl_async.errors import UserError
from rl_async.launcher.capacity import Device, assumed
from rl_async.launcher.plan.memory import (
    BATCH_BYTES,
    CONTEXT_BYTES,
    GRAPH_BYTES,
    LOGITS_CHUNK,
    STAGES,
    TORCH_BYTES,
    ModelSize,
    decoding_bytes,
    engine_bytes,
    model_size,
    size_of,
    trainer_bytes,
    trainer_parts,
)
from rl_async.launcher.plan.planning import Plan, plan
from rl_async.launcher.runs.launch import memory_tables
from rl_async.process.run_files import DeviceBudget, Holder, MemoryBudget, Part, Stage, read_budget, write_budget
from rl_async.trainer.model import CPU_CHUNK_LOGITS
from tests.support.configs import float32_config

# Of a rank that trains calculator: its process, and the numbers per token of 24 groups of 16 rows of 160 tokens.
HELD = TORCH_BYTES + 24 * 16 * 160 * BATCH_BYTES


def test_parameters_of_a_known_model() -> None:
    qwen3_0_6b = {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    size = size_of(qwen3_0_6b)
    assert size is not None
    assert size.parameters == pytest.approx(596_000_000, rel=0.01)
    assert size.kv_per_token == 2 * 28 * 8 * 128


VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "idefics3": {"text_config": {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 4}},
    "gemma3": {
        "text_config": {"hidden_size": 512, "num_hidden_layers": 4},
        "vision_config": {"vision_use_head": False, "image_size": 896, "patch_size": 14},
    },
}


@pytest.mark.parametrize("kind", VISION)
def test_the_weights_of_vision_towers_are_counted(kind: str) -> None:
    """All of them and those of the tower, of models with the default tower of their family."""
    hf = AutoConfig.for_model(kind, **VISION[kind])
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(hf)
    decoder = model.get_decoder()
    own = sum(p.numel() for part in model.model.children() if part is not decoder for p in part.parameters())
    size = size_of(hf.to_dict())
    assert size is not None
    assert size.tower == pytest.approx(own, rel=0.02)
    assert size.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    assert size.tower_activations > size.tower_checkpointed > 0


def test_the_model_that_reads_images_and_is_yet_to_be_made_has_a_tower(tmp_path: Path) -> None:
    paths = [f"model.path={tmp_path}", f"warm_start.out={tmp_path}"]
    config = float32_config("calculator", [*paths, "warm_start.vision=true"])
    size, plain = model_size(config), model_size(float32_config("calculator", paths))
    assert size is not None and plain is not None and size.tower > 0
    assert trainer_bytes(config, size) > trainer_bytes(config, replace(size, tower_activations=0))
    frozen = msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, vision_learning_rate=0.0))
    trained, still = (trainer_parts(c, size, on_gpu=False) for c in (config, frozen))
    assert trained["optimizer"] - still["optimizer"] == size.tower * 4 * 2
    assert trained["activations"] > still["activations"] and trained["weights"] == still["weights"]
    assert decoding_bytes(config, replace(size, tower_layer=1 << 20)) > decoding_bytes(config, size)


MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def test_experts_are_counted_under_mixtrals_name() -> None:
    size = size_of(MIXTRAL_8X7B)
    assert size is not None
    assert size.experts == 8
    assert size.parameters == pytest.approx(46_700_000_000, rel=0.01)


def test_latent_attention_dense_layers_and_shared_experts_of_deepseek_v3_are_counted() -> None:
    size = size_of(DeepseekV3Config().to_dict())
    assert size is not None
    # The model's own count, without the norms.
    assert size.parameters == pytest.approx(671_026_404_352, rel=1e-5)
    # The latent vector and the rotary key of each layer, arXiv:2405.04434, section 2.1.
    assert size.kv_per_token == 61 * (512 + 64)
    assert size.in_experts == 58 * 256 * 3 * 7168 * 2048
    # A token passes through 8 of 256 experts.
    assert size.idle == size.in_experts * 248 // 256


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_every_name_for_the_number_of_experts_is_known(name: str) -> None:
    size = size_of({"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 10, name: 4, "moe_intermediate_size": 6})
    assert size is not None and size.experts == 4
    dense = size_of({"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 10, name: None, "intermediate_size": 6})
    assert dense is not None and dense.experts == 0
    assert size.parameters - dense.parameters == 8 * 4 + 3 * 3 * 8 * 6  # the router, and three experts more


def test_a_config_of_another_kind_is_unknown() -> None:
    assert size_of({"d_model": 512}) is None


def test_no_model_folder_and_no_warm_start_is_unknown(tmp_path: Path) -> None:
    assert model_size(float32_config("calculator", [f"model.path={tmp_path}/none", "warm_start=null"])) is None


def test_a_model_that_is_yet_to_be_made_has_the_size_in_the_config(tmp_path: Path) -> None:
    size = model_size(float32_config("calculator", [f"model.path={tmp_path}/none", f"warm_start.out={tmp_path}/none"]))
    assert size is not None
    assert 50_000 < size.parameters < 500_000


def test_a_broken_model_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"model\.path: .*config\.json is not valid JSON"):
        model_size(float32_config("calculator", [f"model.path={tmp_path}"]))


def test_the_model_folder_is_read(tmp_path: Path) -> None:
    values = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(values))
    size = model_size(float32_config("calculator", [f"model.path={tmp_path}"]))
    assert size is not None
    assert (size.parameters, size.kv_per_token) == (2 * 80 + 4 * 64 + 3 * 8 * 32, 16)


def test_weights_gradients_and_two_moments() -> None:
    size = ModelSize(parameters=1000, kv_per_token=1)
    assert trainer_bytes(float32_config("calculator"), size) == HELD + 16_000 + 4_000


def test_muon_keeps_one_moment_of_the_matrices_that_it_trains() -> None:
    muon = float32_config("calculator", ["trainer.optimizer=muon"])
    size = ModelSize(parameters=1000, kv_per_token=1, matrices=600, critic=100, critic_matrices=30)
    assert trainer_bytes(muon, size) == HELD + 1100 * 20 - 630 * 4


def test_moments_in_8_bits_are_a_byte_a_weight_and_a_scale_for_256() -> None:
    """The bytes that tests/unit/trainer/test_optimizers.py counts are those of the plan."""
    config = float32_config("calculator", ["trainer.optimizer=adamw_8bit"])
    size = ModelSize(parameters=25_600, kv_per_token=1)
    assert trainer_bytes(config, size) == HELD + 25_600 * 12 + 2 * (25_600 + 100 * 4)


@pytest.mark.parametrize(
    ("shape", "ranks", "codes"),
    [
        ((64, 256), 2, True),
        # Ranks would hold 32 and 33 rows, or half a block more.
        ((65, 256), 2, False),
        ((66, 128), 2, False),
        ((15, 256), 1, False),
        # Whole experts, and then rows of each.
        ((4, 16, 256), 2, True),
        ((2, 16, 256), 4, True),
        ((2, 18, 256), 4, False),
    ],
)
def test_moments_of_matrices_that_ranks_do_not_divide_into_blocks_are_float32(
    shape: tuple[int, ...], ranks: int, codes: bool
) -> None:
    config = float32_config("calculator", ["trainer.optimizer=adamw_8bit", f"trainer.ranks={ranks}"])
    numbers = math.prod(shape)
    size = ModelSize(parameters=numbers, kv_per_token=1, shapes=((shape, 1),))
    moments = int(numbers * 2 * (1 + 4 / 256 if codes else 4)) // ranks
    assert trainer_parts(config, size, on_gpu=False)["optimizer"] == moments


def test_the_shapes_of_a_model_are_its_weights() -> None:
    size = size_of(MIXTRAL_8X7B)
    assert size is not None
    routers = 32 * 4096 * 8
    assert sum(math.prod(shape) * number for shape, number in size.shapes) == size.parameters - routers


def test_a_rank_holds_its_part_of_one_copy() -> None:
    size = ModelSize(parameters=1000, kv_per_token=1)
    config = float32_config("calculator", ["trainer.ranks=4", "trainer.replicas=2"])
    assert trainer_bytes(config, size) == HELD + 16_000 // 2


def test_under_adapters_the_base_has_neither_gradients_nor_moments() -> None:
    size = ModelSize(parameters=1000, kv_per_token=1, critic=100)
    config = float32_config("calculator", ["trainer.lora={}", "model.dtype=bfloat16"])
    assert trainer_bytes(config, size) == HELD + 1000 * 2 + 100 * 20


def test_checkpointed_layers_keep_their_input_alone() -> None:
    config = float32_config("calculator", ["trainer.activation_checkpointing=true"])
    tokens = min(24 * 16 // 2 * 160, config.trainer.max_tokens_per_microbatch)
    size = ModelSize(parameters=0, kv_per_token=0, activations=1000, checkpointed=100)
    assert trainer_bytes(config, size) == HELD + tokens * 100 * 4
    shape = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    two, nine = (size_of(shape | {"num_hidden_layers": layers}) for layers in (2, 9))
    assert two is not None and nine is not None
    assert nine.checkpointed - two.checkpointed == 7 * 8


def test_a_critic_of_its_own_counts_and_a_shared_one_does_not(tmp_path: Path) -> None:
    values = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "critic" / "model").mkdir(parents=True)
    (tmp_path / "critic" / "model" / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 2}))
    gae = [f"model.path={tmp_path}", "algorithm.advantage=gae"]
    layer, embeddings = 4 * 64 + 3 * 8 * 32, 2 * 80
    own = float32_config("calculator", [*gae, "critic={}"])
    both = model_size(own)
    assert both is not None
    assert (both.parameters, both.kv_per_token, both.critic) == (layer + embeddings, 16, layer + embeddings)
    shared = model_size(float32_config("calculator", [*gae, "critic.shared=true"]))
    assert shared == replace(both, critic=0, critic_matrices=0, critic_shapes=())
    alone = trainer_bytes(own, shared)
    assert alone is not None
    assert trainer_bytes(own, both) == alone + 20 * (layer + embeddings)
    larger = model_size(float32_config("calculator", [*gae, f"critic.path={tmp_path}/critic"]))
    assert larger == replace(
        both,
        critic=2 * layer + embeddings,
        critic_matrices=2 * layer,
        critic_shapes=tuple((shape, 2 * number) for shape, number in both.shapes[:-1]) + both.shapes[-1:],
    )
    assert model_size(float32_config("calculator", [*gae, f"critic.path={tmp_path}/nothing"])) is None


def test_a_teacher_beside_the_trainer_holds_its_weights_and_one_at_a_server_does_not(tmp_path: Path) -> None:
    values = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "teacher").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 3}))
    model = f"model.path={tmp_path}"
    beside = float32_config("calculator", [model, f"algorithm.teacher.path={tmp_path}/teacher"])
    several = f"algorithm.teacher.by_source={{one: {{path: {tmp_path}/teacher}}, two: {{path: {tmp_path}/teacher}}}}"
    both = model_size(float32_config("calculator", [model, several]))
    served = "algorithm.teacher.endpoint={url: 'http://127.0.0.1:1/v1', model: m}"
    alone, taught = model_size(float32_config("calculator", [model, served])), model_size(beside)
    weights = 3 * (4 * 64 + 3 * 8 * 32) + 2 * 80
    assert (
        alone is not None and taught == replace(alone, teacher=weights) and both == replace(alone, teacher=2 * weights)
    )
    assert trainer_bytes(beside, taught) == (trainer_bytes(beside, alone) or 0) + 4 * weights


def test_an_engine_holds_weights_and_a_full_cache_and_the_embedded_one_prefixes_too() -> None:
    shape = ["rollout.max_batch_size=10", "rollout.max_model_len=160"]
    size, given = ModelSize(parameters=1000, kv_per_token=3), "rollout.cache_bytes=20000"
    for more, on_gpu, cached in (
        (["rollout.engine=embedded"], False, 9600),
        (["rollout.engine=embedded", given], False, 5000),
        (["rollout.engine=embedded", given], True, 5000),
        (["rollout.engine=embedded"], True, 9600),
        (["rollout.engine=[embedded, embedded]", "rollout.engines=2"], False, 9600),
        (["rollout.engine=vllm"], True, 4800),
        (["rollout.engine=vllm", given], False, 5000),
        (["rollout.engine=vllm"], False, (1 << 30) // 4),
    ):
        config = float32_config("calculator", shape + more)
        assert engine_bytes(config, size, on_gpu=on_gpu) == TORCH_BYTES + (1000 + cached) * 4
    ranks = [*shape, "rollout.engine=vllm", "rollout.tensor_parallel=2", "rollout.pipeline_parallel=2"]
    assert engine_bytes(float32_config("calculator", ranks), size, on_gpu=True) == 4 * TORCH_BYTES + (1000 + 4800) * 4
    each = float32_config("calculator", [*ranks, given])
    assert engine_bytes(each, size, on_gpu=False) == 4 * (TORCH_BYTES + 20_000) + 1000 * 4


def test_matrices_in_8_bits_take_a_byte_each_once_the_embedded_engine_has_loaded_all_in_full() -> None:
    size = ModelSize(parameters=1000, kv_per_token=0, matrices=600)
    numbers = ["rollout.quantization=fp8", "model.dtype=bfloat16"]
    vllm = ["rollout.engine=vllm", "rollout.cache_bytes=1", *numbers]
    assert engine_bytes(float32_config("calculator", vllm), size) == TORCH_BYTES + 400 * 2 + 600 + 1
    assert engine_bytes(float32_config("calculator", numbers), size) == TORCH_BYTES + 1000 * 2
    cached = ModelSize(parameters=1000, kv_per_token=1, matrices=600)
    many = [*numbers, "rollout.max_batch_size=10", "rollout.max_model_len=160"]
    assert engine_bytes(float32_config("calculator", many), cached) == TORCH_BYTES + 400 * 2 + 600 + 2 * 1600 * 2


def test_graphs_of_decode_steps_are_part_of_an_engine_on_a_gpu() -> None:
    static = [
        "rollout.engine=embedded",
        "rollout.engine_args=['--decode=static']",
        "rollout.max_batch_size=48",
        "rollout.max_model_len=160",
    ]
    # 1, 2, 4, 8, 16, 32 and 48 rows; 64, 128 and 160 keys; sampled and greedy.
    graphs = 7 * 3 * 2 * GRAPH_BYTES
    for gpus, expected in ((1, graphs), (0, 0)):
        with_graphs, eager = (
            the(planned(*given, gpus=gpus), "engine")[1] for given in (static, [static[0], *static[2:]])
        )
        stages = (with_graphs.stages["rollout"], eager.stages["rollout"])
        assert stages[0].get("activations", 0) - stages[1].get("activations", 0) == expected


def test_what_is_quantised_are_the_matrices_of_layers() -> None:
    size = size_of(MIXTRAL_8X7B)
    assert size is not None
    assert size.parameters - size.matrices == 2 * 32000 * 4096 + 32 * 4096 * 8  # embeddings, last layer, routers


@pytest.mark.parametrize("option", ["way=staged", "way=delta", "adapters=add"])
def test_an_engine_that_keeps_a_copy_holds_its_weights_twice(option: str) -> None:
    size = ModelSize(parameters=1000, kv_per_token=0)
    lora = ["trainer.lora={}"] if "adapters" in option else []
    config = float32_config("calculator", [*lora, f"weight_sync.{option}"])
    assert engine_bytes(config, size) == TORCH_BYTES + 2 * 1000 * 4
    ranks = ["rollout.engine=vllm", "rollout.tensor_parallel=2", *lora, f"weight_sync.{option}"]
    # Ranks hold slices if updates are staged, and all weights otherwise.
    copies = 1 if option == "way=staged" else 2
    divided = float32_config("calculator", [*ranks, "rollout.cache_bytes=1"])
    assert engine_bytes(divided, size) == 2 * (TORCH_BYTES + 1) + (1 + copies) * 1000 * 4


def test_one_forward_pass_counts_up_to_its_budget_of_tokens() -> None:
    size = ModelSize(parameters=0, kv_per_token=0, activations=1000, vocab=100)
    small, large = (
        trainer_bytes(float32_config("calculator", [f"trainer.max_tokens_per_microbatch={n}"]), size)
        for n in (1000, 1_000_000)
    )
    assert small == HELD + 1000 * (1000 * 4 + 100 * 4 * 2)
    rows = 24 * 16 // 2
    assert large == HELD + rows * 160 * 1000 * 4 + rows * 160 * 100 * 4 * 2
    wide = ModelSize(parameters=0, kv_per_token=0, vocab=150_000)
    assert trainer_bytes(float32_config("calculator"), wide) == HELD + LOGITS_CHUNK * 4 * 2


def test_ranks_that_share_rows_have_a_part_of_their_tokens_each() -> None:
    size = ModelSize(parameters=0, kv_per_token=0, activations=1000, vocab=100)
    alone, shared = (
        trainer_bytes(float32_config("calculator", ["trainer.max_tokens_per_microbatch=1001", *more]), size)
        for more in ([], ["trainer.ranks=2", "trainer.sequence_parallel=2"])
    )
    per_token = 1000 * 4 + 100 * 4 * 2
    assert (alone, shared) == (HELD + 1001 * per_token, HELD + 501 * per_token)
    whole = ["trainer.max_tokens_per_microbatch=1000000", "trainer.ranks=2", "trainer.sequence_parallel=2"]
    rows = 24 * 16 // 2
    assert trainer_bytes(float32_config("calculator", whole), size) == HELD + rows * 160 // 2 * per_token


def test_ranks_of_one_copy_of_the_model_have_its_rows_each() -> None:
    size = ModelSize(parameters=0, kv_per_token=0, activations=1000, vocab=100)
    one, tensor, data = (
        trainer_bytes(float32_config("calculator", ["trainer.max_tokens_per_microbatch=1000000", *more]), size)
        for more in (
            [],
            ["trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor_parallel=2"],
            ["trainer.backend=megatron", "trainer.ranks=2"],
        )
    )
    assert tensor == one and data - HELD == (one - HELD) // 2


def test_the_chunk_of_logits_is_the_trainers() -> None:
    assert CPU_CHUNK_LOGITS == LOGITS_CHUNK


def test_the_last_layer_is_gathered_with_its_gradient() -> None:
    config = float32_config("calculator", ["model.dtype=bfloat16"])
    without, size = (ModelSize(parameters=1000, kv_per_token=0, head=head) for head in (0, 100))
    assert trainer_bytes(config, size) == trainer_bytes(config, without) + 100 * (2 + 4 + 2 + 4)
    shape = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 10}
    known = size_of(shape)
    assert known is not None and known.head == 80


def test_several_ranks_keep_whole_gradients_between_micro_batches() -> None:
    size = ModelSize(parameters=1000, kv_per_token=0)
    one, two, all_at_once = (
        trainer_bytes(float32_config("calculator", [f"trainer.max_tokens_per_microbatch={n}", *more]), size)
        for n, more in ((200, []), (200, ["trainer.ranks=2"]), (1_000_000, ["trainer.ranks=2"]))
    )
    assert (one, two, all_at_once) == (HELD + 20_000, HELD + 8_000 + 4_000, HELD + 8_000)


QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def test_expert_parallel_ranks_divide_the_experts_alone() -> None:
    size = size_of(QWEN3_30B_A3B)
    assert size is not None
    experts = 48 * 128 * 3 * 2048 * 768
    assert (size.in_experts, size.idle) == (experts, experts * 120 // 128)
    assert 30e9 < size.parameters < 31e9 and 3e9 < size.parameters - size.idle < 3.5e9, "as its name says"
    megatron = ["trainer.backend=megatron", "trainer.ranks=16", "model.dtype=bfloat16"]
    configs = {ranks: load_config("calculator", [*megatron, f"trainer.expert_parallel={ranks}"]) for ranks in (1, 8)}
    parts = {ranks: trainer_parts(config, size, on_gpu=True) for ranks, config in configs.items()}
    own = size.parameters - experts + experts // 8
    assert (parts[1]["gradients"], parts[8]["gradients"]) == (4 * size.parameters, 4 * own)
    assert parts[1]["weights"] - parts[8]["weights"] == 2 * (size.parameters - own)
    assert parts[1]["optimizer"] == parts[8]["optimizer"]


def test_a_token_of_a_mixture_trains_the_experts_that_are_chosen_for_it() -> None:
    size = size_of(QWEN3_30B_A3B)
    assert size is not None
    device = Device()
    costs = assumed(size, device, tokens=1000)
    assert costs.train_token_s == 8 * (size.parameters - size.idle) / (device.tflops * 1e12 * device.training_share)


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
    on_the_host = the(planned("weight_sync.way=disk", gpus=1), "trainer")[1]
    assert on_the_host.stages["load"] == {"runtime": CONTEXT_BYTES}
    assert "published" not in on_the_host.stages["gather"]
    gathered = the(planned("weight_sync.way=delta", gpus=1), "trainer")[1]
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
    on_the_host = planned("trainer.ranks=2", "rollout.engines=2", "weight_sync.way=disk", gpus=2)
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
            ["'load'", "engine-0", "rollout.tensor_parallel", "trainer-0", "trainer.ranks", "weight_sync.way"],
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


@pytest.mark.parametrize(("backend", "each"), [("megatron", 2), ("fsdp2", 4)])
def test_a_reference_is_held_in_the_type_that_its_backend_computes_in(backend: str, each: int) -> None:
    keys = (f"trainer.backend={backend}", "model.dtype=bfloat16", "algorithm.kl.coef=0.1")
    found = the(planned(*keys, gpus=1), "trainer")[1]
    assert found.stages["train"]["reference"] == each * SIZE.parameters
