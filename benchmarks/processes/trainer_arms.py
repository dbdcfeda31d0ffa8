"""The demo's model and random rows for the trainer's benchmarks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_async.configs.load import load_config
from rl_async.launcher.plan.memory import tiny_shape
from rl_async.messages import Sampling, Trajectory, Version, VersionRun
from rl_async.trainer.packing import Tensors, collate, empty_tensors

VOCAB = 200
BUDGET = 16384  # tokens per forward pass


def save_model(folder: Path) -> None:
    """The demo's model with random weights."""
    torch.manual_seed(0)
    settings = load_config("calculator").warm_start
    assert settings is not None
    config = Qwen3Config(vocab_size=VOCAB, tie_word_embeddings=True, **tiny_shape(settings))
    Qwen3ForCausalLM(config).save_pretrained(folder)


def rows_of(lengths: Sequence[int]) -> list[Trajectory]:
    """Random rows, the first quarter of each a prompt."""
    draw = np.random.default_rng(0)
    rows = []
    for i, length in enumerate(lengths):
        mask = np.arange(length) >= length // 4
        rows.append(
            Trajectory(
                task_id=str(i),
                group_id=i,
                sample=0,
                attempt=0,
                episode_id=str(i),
                token_ids=draw.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.zeros(length, np.float32),
                versions=[VersionRun(Version(0, 0), 0, int(mask.sum()))],
                sampling=Sampling(),
                reward=0.0,
            )
        )
    return rows


def long_tailed(rows: int) -> list[int]:
    """Log-normal lengths: half of the rows below 90 tokens, the longest of 256 rows above 1,500."""
    return np.clip(np.random.default_rng(0).lognormal(4.5, 1.2, rows), 16, 4096).astype(int).tolist()


def micro_batches(rows: Sequence[Trajectory], parts: Sequence[Sequence[int]]) -> list[Tensors]:
    return [collate([rows[i] for i in part], device="cpu") if part else empty_tensors("cpu") for part in parts]


def in_arrival_order(lengths: Sequence[int]) -> list[list[int]]:
    """MicroBatch-batches of rows as they come, padded size within the budget."""
    parts, longest = list[list[int]](), 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if parts and longest * (len(parts[-1]) + 1) <= BUDGET:
            parts[-1].append(i)
        else:
            parts.append([i])
            longest = length
    return parts


def resident(name: str, pid: int | str = "self") -> int:
    """Return VmRSS or VmHWM of a process in bytes; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
