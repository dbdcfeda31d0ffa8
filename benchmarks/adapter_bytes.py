"""Bytes of a publication after a step, as a share of the weights: whole weights trained, or adapters merged into them.

    python benchmarks/adapter_bytes.py

bfloat16 on the wire, ``weight_sync.delta``, AdamW at 1e-5, random tokens, a random Qwen3 of 12 M parameters. The last
column is what adapters in float32 would be by themselves, as a share.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from trainer_arms import VOCAB, rows_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_async.configs.lora import LoraConfig
from rl_async.configs.schema import TrainerConfig
from rl_async.trainer.backend import Outputs
from rl_async.trainer.batching import collate
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.weight_sync.buckets import make_buckets
from rl_async.weight_sync.delta import deltas

ARMS = {
    "whole weights": None,
    "adapters, all linear layers": LoraConfig(rank=8),
    "adapters, q_proj and v_proj": LoraConfig(rank=8, targets=("q_proj", "v_proj")),
}
STEPS, BUCKETS_MIB = 2, (1, 64)


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 8 * VOCAB}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(folder)


def shares(folder: str, lora: LoraConfig | None) -> list[float]:
    """Of the delta of the last step for each size of bucket, and of the adapters themselves."""
    backend = Fsdp2Backend(folder, "bfloat16", "cpu", TrainerConfig(learning_rate=1e-5, lora=lora))
    batch = collate(rows_of([64] * 8), step=0, max_staleness=None, device="cpu")

    def loss_fn(_: int, outputs: Outputs) -> torch.Tensor:
        assert outputs.logprobs is not None
        return -torch.where(batch.mask, outputs.logprobs, 0.0).mean()

    versions = []
    for _ in range(STEPS):
        backend.step([batch], loss_fn)
        versions.append([(name, rows.to(backend.dtype, copy=True)) for (name, _), rows in backend.parts().held.items()])
    found, total = [], sum(tensor.nbytes for _, tensor in versions[-1])
    for size in BUCKETS_MIB:
        old, new = (list(make_buckets(version, size << 20)) for version in versions[-2:])
        found.append(sum(bucket.nbytes for bucket in deltas(new, old, "0")) / total)
    adapters = (p.numel() * 4 for name, p in backend.model.named_parameters() if ".lora_" in name)
    return [*found, sum(adapters) / total]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for name, lora in ARMS.items():
            row = (f"{share:.3f}" for share in shares(folder, lora))
            print(f"{name:<30}", *row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
