"""Publications of models that no machine here can hold, planned by their shapes: built on the meta device."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_async.weight_sync.experts import single_layout, single_specs
from rl_async.weight_sync.layout import Layout, TensorSpec, engine, fsdp2, megatron, volume, whole
from rl_async.weight_sync.sender import plan_rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BUCKET = 1 << 30


def qwen3_235b() -> Any:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "vocab_size": 151936}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 94}
    experts = {"num_experts": 128, "num_experts_per_tok": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, tie_word_embeddings=False))


def deepseek_671b() -> Any:
    return DeepseekV3ForCausalLM(DeepseekV3Config())


def shapes(build: Callable[[], Any]) -> dict[str, TensorSpec]:
    with torch.device("meta"):
        return {name: TensorSpec(tuple(p.shape)) for name, p in build().named_parameters()}


def held_bytes(layout: Layout) -> Counter[int]:
    held: Counter[int] = Counter()
    for name, shards in layout.shards.items():
        for shard in shards:
            held[shard.rank] += layout.nbytes(name, shard.box)
    return held


def check(layout: Layout, copies: int, bucket: int = BUCKET) -> None:
    """Assert that every element has ``copies`` holders, and is sent once, by one of them, in rounds that fit."""
    for name, spec in layout.tensors.items():
        assert sum(volume(shard.box) for shard in layout.shards[name]) == copies * volume(whole(spec.shape)), name
    rounds = plan_rounds(layout, bucket)
    sent: dict[str, int] = defaultdict(int)
    holders = {name: set(shards) for name, shards in layout.shards.items()}
    for parts in rounds.parts:
        assert sum(layout.nbytes(part.name, part.box) for part in parts) <= bucket
        for part in parts:
            sent[part.name] += volume(part.box)
            assert part.held in holders[part.name]
    assert sent == {name: volume(whole(spec.shape)) for name, spec in layout.tensors.items()}


@pytest.mark.parametrize(
    ("build", "billions", "ranks", "replicas"),
    [
        pytest.param(qwen3_235b, 235.1, 64, 1, id="235B on 64"),
        # More ranks than experts would leave some without any.
        pytest.param(deepseek_671b, 671.0, 256, 2, id="671B on 512", marks=pytest.mark.nightly),
    ],
)
def test_ranks_of_fsdp2_hold_equal_parts_and_send_each_element_once(
    build: Callable[[], Any], billions: float, ranks: int, replicas: int
) -> None:
    specs = shapes(build)
    total = sum(volume(whole(spec.shape)) for spec in specs.values())
    assert round(total / 1e9, 1) == billions
    stacked = fsdp2(specs, ranks, replicas)
    held = held_bytes(stacked)
    assert len(held) == ranks * replicas
    # Norms of a few thousand numbers are all that does not divide.
    assert max(held.values()) < 1.01 * 2 * total / ranks
    check(single_layout(stacked), replicas)


def test_ranks_of_megatron_send_each_element_once_and_workers_need_no_more_than_their_part() -> None:
    specs: Mapping[str, TensorSpec] = single_specs(shapes(qwen3_235b))
    layout = megatron(specs, kv_heads=4, tp=4, pp=2, ep=8, dp=8, vocab_multiple=128)
    rounds = plan_rounds(layout, BUCKET)
    sent: Counter[str] = Counter()
    for parts in rounds.parts:
        for part in parts:
            sent[part.name] += volume(part.box)
    assert sent == {name: volume(whole(spec.shape)) for name, spec in specs.items()}
    workers = engine(specs, tp=8, kv_heads=4, ep=8)
    needs = {name: tuple(s.box for s in shards if s.rank == 3) for name, shards in workers.shards.items()}
    wanted = sum(volume(box) for boxes in needs.values() for box in boxes)
    cuts = (cut for rank in rounds.senders for parts in rounds.cut(rank, needs) for cut in parts)
    assert sum(volume(box) for cut in cuts for box in cut.boxes) == wanted
