"""Plan clusters for models that no machine here can hold: their parameters exist on the meta device only.

    python -m benchmarks.planned.clusters [235B] [671B] [--json FILE]

Each cluster is a run's config with a number of GPUs. Checked are that each element of each parameter has as many owners
as there are replicas, that a publication's rounds send each element exactly once in buckets that hold them, and that
the memory of each GPU suffices in each stage of a step, which ``plan`` refuses otherwise. Exit code 1 if a check fails.
"""

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.memory import STAGES, gib, size_of
from rl_async.launcher.plan.planning import Plan, plan
from rl_async.weight_sync.layout import Layout, TensorSpec, fsdp2, single_layout, volume, whole
from rl_async.weight_sync.sender import Rounds, plan_rounds

# Of an H200, in bytes, as torch reports it.
CAPACITY = 140 << 30
BUCKET = 1 << 30
# What both have in common. A rank gets one row of a mini-batch: with several micro-batches FSDP2 would keep the sum of
# whole gradients between them, which no GPU holds at these sizes.
COMMON = (
    "model.dtype=bfloat16",
    "rollout.engine=vllm",
    "rollout.tensor_parallel=8",
    "rollout.max_model_len=16384",
    "rollout.max_tokens=14000",
    "trainer.max_tokens_per_microbatch=16384",
    "trainer.activation_checkpointing=true",
    "weight_sync.way=nccl",
    f"weight_sync.bucket_bytes={BUCKET}",
)


def qwen3_235b() -> Any:
    """Build Qwen3-235B-A22B on the meta device."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "vocab_size": 151936}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 94}
    experts = {"num_experts": 128, "num_experts_per_tok": 8}
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, tie_word_embeddings=False))


def deepseek_671b() -> Any:
    """Build DeepSeek-V3, whose shape is the default of its config, on the meta device."""
    with torch.device("meta"):
        return DeepseekV3ForCausalLM(DeepseekV3Config())


@dataclass(frozen=True)
class Cluster:
    """A model, the GPUs of a disaggregated run, and the keys of its config besides COMMON."""

    build: Callable[[], Any]
    gpus: int
    overrides: Sequence[str]


CLUSTERS: Mapping[str, Cluster] = {
    "235B": Cluster(
        qwen3_235b,
        64,
        (
            *("trainer.ranks=48", "rollout.engines=2"),
            *("data.train_batch_groups=48", "rollout.group_size=8", "trainer.minibatches=8"),
        ),
    ),
    # More ranks than experts would leave some without any.
    "671B": Cluster(
        deepseek_671b,
        512,
        (
            *("trainer.ranks=256", "rollout.engines=32", "rollout.quantization=fp8"),
            *("data.train_batch_groups=128", "rollout.group_size=16", "trainer.minibatches=8"),
        ),
    ),
}


def shapes(model: Any) -> dict[str, TensorSpec]:
    """Return the parameters of a model by name, as they travel."""
    return {name: TensorSpec(tuple(parameter.shape)) for name, parameter in model.named_parameters()}


def check_layout(layout: Layout, copies: int, bucket: int = BUCKET) -> Rounds:
    """Return the rounds of a publication. Raises AssertionError unless each element of a tensor has ``copies`` owners,
    and is sent once, by one of them, in rounds that fit into the bucket.

    ``Layout`` has refused shards that overlap on a rank. That parts of a tensor do not overlap follows from their total
    and from ``plan_rounds``, which divides each piece among disjoint boxes.
    """
    for name, spec in layout.tensors.items():
        owned = sum(volume(shard.box) for shard in layout.shards[name])
        assert owned == copies * volume(whole(spec.shape)), f"{name}: {owned} owned elements"
    rounds = plan_rounds(layout, bucket)
    sent: Counter[str] = Counter()
    holders = {name: set(shards) for name, shards in layout.shards.items()}
    for parts in rounds.parts:
        assert sum(layout.nbytes(part.name, part.box) for part in parts) <= bucket
        for part in parts:
            sent[part.name] += volume(part.box)
            assert part.held in holders[part.name], f"{part.name}: {part.held} does not own what it sends"
    assert sent == {name: volume(whole(spec.shape)) for name, spec in layout.tensors.items()}
    return rounds


def plan_cluster(cluster: Cluster) -> tuple[RunConfig, Plan, dict[str, Any]]:
    """Return a cluster's config and plan, and the figures that ``main`` prints.

    Raises UserError if a GPU lacks memory in some stage, and AssertionError as ``check_layout`` does.
    """
    began = time.process_time()
    model = cluster.build()
    config = load_config("calculator", [*COMMON, *cluster.overrides], mode="disaggregated")
    size, specs = size_of(model.config.to_dict()), shapes(model)
    assert size is not None
    layout = fsdp2(specs, config.trainer.ranks // config.trainer.replicas, config.trainer.replicas)
    held: Counter[int] = Counter()
    for shard in itertools.chain.from_iterable(layout.shards.values()):
        held[shard.rank] += volume(shard.box)
    rounds = check_layout(single_layout(layout), config.trainer.replicas)
    sent: Counter[int] = Counter()
    for part in itertools.chain.from_iterable(rounds.parts):
        sent[part.held.rank] += volume(part.box)
    found = plan(config, Path("run"), size=size, gpus=cluster.gpus, capacity=CAPACITY)
    peaks: dict[str, dict[str, int]] = {}
    for device in found.memory.devices:
        of_role = peaks.setdefault(device.holders[0].role, dict.fromkeys(STAGES, 0))
        of_role |= {stage: max(of_role[stage], device.total(stage)) for stage in STAGES}
    parameters = sum(volume(whole(spec.shape)) for spec in specs.values())
    return (
        config,
        found,
        {
            "parameters": parameters,
            "estimated_parameters": size.parameters,
            "ranks": len(held),
            "largest_share": max(held.values()) * len(held) / (parameters * config.trainer.replicas),
            "rounds": len(rounds.parts),
            "parts": sum(map(len, rounds.parts)),
            "most_sent_vs_mean": max(sent.values()) * len(sent) / sum(sent.values()),
            "peak_bytes": peaks,
            "kv_cache_bytes": min(
                holder.stages["rollout"]["KV cache"]
                for device in found.memory.devices
                for holder in device.holders
                if holder.role == "engine"
            ),
            "processor_s": time.process_time() - began,
        },
    )


def show(name: str, cluster: Cluster, config: RunConfig, found: dict[str, Any]) -> None:
    """Print a cluster's figures."""
    engines = f"{config.rollout.engines} engines of {config.rollout.ranks}"
    print(f"{name} on {cluster.gpus} GPUs of {gib(CAPACITY)}: {config.trainer.ranks} trainer ranks, {engines}")
    print(f"  {' '.join(cluster.overrides)}")
    off = found["estimated_parameters"] / found["parameters"] - 1
    print(f"  parameters: {found['parameters'] / 1e9:.1f} billion, all owned; the plan's estimate is {off:+.4%} off")
    print(f"  largest share of a rank: {found['largest_share']:.3f} of an equal one")
    largest = f"the busiest rank sends {found['most_sent_vs_mean']:.3f} of the mean"
    print(f"  publication: {found['rounds']} rounds, {found['parts']} parts, each element once; {largest}")
    for role, stages in found["peak_bytes"].items():
        print(f"  {role} GPU: " + ", ".join(f"{stage} {gib(nbytes)}" for stage, nbytes in stages.items()))
    print(f"  KV cache of an engine's rank: {gib(found['kv_cache_bytes'])}")
    print(f"  planned in {found['processor_s']:.1f} s of processor time", flush=True)


def main() -> int:
    """Print the plans; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLUSTERS)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - CLUSTERS.keys():
        parser.error(f"there is no cluster {', '.join(sorted(unknown))}; there are {', '.join(CLUSTERS)}")
    results: dict[str, Any] = {}
    for name in arguments.names or CLUSTERS:
        config, _, results[name] = plan_cluster(CLUSTERS[name])
        show(name, CLUSTERS[name], config, results[name])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
