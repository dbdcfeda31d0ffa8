"""Experts one by one: under the names of published checkpoints, and on the ranks that hold them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.weight_sync.experts import expert_parts, single, single_layout, single_shards, single_specs
from rl_async.weight_sync.layout import TensorSpec, fsdp2, sharded_dimension
from rl_async.weight_sync.reshard import one_box_each

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_names_and_weights_are_those_of_a_published_checkpoint(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
    model.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    found = dict(single(model.named_parameters()))
    assert found.keys() == published.keys()
    assert all(found[name].equal(tensor) for name, tensor in published.items())
    specs = single_specs({n: TensorSpec(tuple(p.shape), "float32") for n, p in model.named_parameters()})
    assert {name: spec.shape for name, spec in specs.items()} == {n: tuple(t.shape) for n, t in published.items()}


def test_views_write_through_to_the_stacked_tensor() -> None:
    stacked = torch.zeros(3, 4, 2)
    for number, (_, part) in enumerate(single([("m.experts.gate_up_proj", stacked)])):
        part.fill_(number)
    assert stacked[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]


def test_other_tensors_keep_their_names() -> None:
    assert not expert_parts("m.mlp.gate_up_proj.weight", (8, 4))
    assert not expert_parts("m.experts.gate_up_proj", (8, 4))
    assert not expert_parts("m.shared_expert.down_proj", (2, 8, 4))


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 1), (7, 1)])
def test_ranks_of_fsdp2_hold_experts_or_rows_of_them(ranks: int, replicas: int) -> None:
    tensors = {
        "m.experts.gate_up_proj": torch.arange(5 * 4 * 3.0).view(5, 4, 3),
        "m.experts.down_proj": torch.arange(100, 100 + 5 * 3 * 2.0).view(5, 3, 2),
        "m.gate.weight": torch.arange(10.0).view(5, 2),
    }
    stacked = fsdp2({name: TensorSpec(tuple(t.shape), "float32") for name, t in tensors.items()}, ranks, replicas)
    layout, wanted = single_layout(stacked), dict(single(tensors.items()))
    assert layout.tensors.keys() == wanted.keys()
    held: dict[str, int] = dict.fromkeys(wanted, 0)
    for rank in range(ranks * replicas):
        dealt = {name: t.chunk(ranks, sharded_dimension(t.shape, ranks)) for name, t in tensors.items()}
        chunks = {name: parts[rank % ranks] for name, parts in dealt.items() if rank % ranks < len(parts)}
        found = single_shards(stacked, one_box_each(stacked, rank, chunks))
        assert set(found) == set(layout.held(rank))
        for (name, box), part in found.items():
            rows, columns = (slice(*side) for side in box)
            assert part.equal(wanted[name][rows, columns])
            held[name] += part.numel()
    assert held == {name: replicas * t.numel() for name, t in wanted.items()}
