"""The embedded engine on a real model: its speed beside vLLM's, and what it and the trainer differ by."""

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import torch
import torch.distributed as dist
import uvloop
from transformers import AutoModelForCausalLM

from benchmarks.engines import BareClient, rate
from benchmarks.processes.engine_process import serving
from benchmarks.real.setting import Setting
from rl_async.configs.load import load_config
from rl_async.messages import Sampling
from rl_async.process.http_auth import bearer
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors

AT_ONCE = (8, 32, 64)
NEW = 24  # sampled tokens per request
REPEATS = 3
THREADS = 2
ROWS = 16  # of the comparison with the trainer


def embedded_vs_vllm(setting: Setting) -> float | None:
    """Print tokens per second of both engines and return the smallest ratio; None without vLLM."""
    if not Path(setting.vllm).exists():
        print(f"vLLM was not measured: no {setting.vllm}; scripts/install vllm makes one", file=sys.stderr)
        return None
    options = {
        "model.path": setting.model,
        "model.dtype": "bfloat16",
        "launcher.threads": THREADS,
        "rollout.max_batch_size": max(AT_ONCE),
        "rollout.max_model_len": 256,
    }
    config = load_config("calculator", [f"{key}={value}" for key, value in options.items()])
    requests = [
        GenerateRequest(request_id=f"r{n}", token_ids=ids, sampling=Sampling(), max_tokens=NEW, stop_token_ids=[])
        for n, ids in enumerate(setting.prompts(max(AT_ONCE)))
    ]
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        serving("embedded", config, Path(one), "") as ours,  # one engine idles while the other is measured
        serving("vllm", config, Path(other), setting.vllm) as theirs,
    ):
        ours_rates, vllm_rates = uvloop.run(_in_turn(requests, (ours, theirs)))
    ratios = []
    for count in AT_ONCE:
        pair = [statistics.median(rates[count][1:]) for rates in (ours_rates, vllm_rates)]
        ratios.append(pair[0] / pair[1])
        print(f"  {count} at once: embedded {pair[0]:,.0f}, vLLM {pair[1]:,.0f} tokens/s, ratio {ratios[-1]:.2f}")
    return min(ratios)


async def _in_turn(
    requests: list[GenerateRequest], engines: tuple[tuple[str, str], ...]
) -> list[dict[int, list[float]]]:
    """Return each engine's tokens per second by how many requests at once; the first of each warms up."""
    found: list[dict[int, list[float]]] = [{count: [] for count in AT_ONCE} for _ in engines]
    for _ in range(REPEATS + 1):
        for count in AT_ONCE:
            for rates, (url, token) in zip(found, engines, strict=True):
                async with aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), headers=bearer(token)
                ) as session:
                    client = BareClient(url, session)
                    rates[count].append(await rate([[request] for request in requests[:count]], client, count))
    return found


def differences(setting: Setting, dtype: str) -> torch.Tensor:
    """Return |engine - trainer| of the log-probability of each sampled token."""
    kind = getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(setting.model, dtype=kind, attn_implementation="sdpa").eval()
    core = EngineCore(model, max_batch=ROWS, max_length=256)
    rows = [
        Sequence(f"r{n}", ids, Sampling(), NEW, frozenset(), seed=n, deliver=lambda _: None)
        for n, ids in enumerate(setting.prompts(ROWS))
    ]
    for row in rows:
        core.add(row)
    while core.unfinished:
        core.step()
    del core, model
    trained = _trainer_logprobs(setting, dtype, rows)
    return torch.cat(
        [
            (trained[n, row.prompt_length - 1 : len(row.tokens) - 1] - torch.tensor(row.logprobs)).abs()
            for n, row in enumerate(rows)
        ]
    )


def _trainer_logprobs(setting: Setting, dtype: str, rows: list[Sequence]) -> torch.Tensor:
    """Return log-probabilities [B, T-1] as the trainer's FSDP2 backend computes them, on one rank."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros((len(rows), int(lengths.max())), dtype=torch.int64)
    for n, row in enumerate(rows):
        tokens[n, : len(row.tokens)] = torch.tensor(row.tokens)
    batch = Tensors(tokens, lengths, tokens[:, 1:] != 0, torch.ones(len(rows), 1, 1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        outputs = Fsdp2Backend(setting.model, dtype, "cpu", None).forward(batch)
    finally:
        dist.destroy_process_group()
    assert outputs.logprobs is not None
    return outputs.logprobs.detach()


KEYS: dict[str, Callable[[Setting], float | None]] = {
    "real_embedded_vs_vllm": embedded_vs_vllm,
    "real_mismatch_fp32_max": lambda setting: differences(setting, "float32").max().item(),
    "real_mismatch_bf16_mean": lambda setting: differences(setting, "bfloat16").mean().item(),
}
