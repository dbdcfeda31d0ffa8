"""How much of the model's own speed does the embedded engine keep? Sampled tokens per second, in one run.

The limit is the same model in one static batch: Transformers' ``generate`` with its own cache, all sequences of one
length, nothing arriving and nothing leaving. Against it stand the engine in this process, and the engine's server
process over HTTP, both with every request on its own.

    in_process_vs_static[n]   in-process tokens/s / static tokens/s, n sequences at once    limit 1.0
    http_vs_static[n]         over HTTP                                                     limit 1.0

    python benchmarks/engine.py [--sequences 8 64 256] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import torch
from transformers import Qwen3ForCausalLM

from rl_async.configs.load import dump
from rl_async.configs.schema import (
    AgentConfig,
    DataConfig,
    LauncherConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
)
from rl_async.launcher.prepare import tiny_model
from rl_async.messages import Sampling
from rl_async.rollout_server.api import GenerateRequest, Generator
from rl_async.rollout_server.embedded.local import LocalEngine
from rl_async.rollout_server.vllm import VllmEngine

PROMPT, NEW = 25, 32  # tokens
REPEATS = 3


class Shape:
    """What ``tiny_model`` asks of a tokenizer."""

    model_max_length, eos_token_id, pad_token_id = 160, 1, 0

    def __len__(self) -> int:
        return 200


def prompts(count: int) -> list[list[int]]:
    return torch.randint(2, len(Shape()), (count, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()


def static(model: Qwen3ForCausalLM, count: int) -> float:
    """Sampled tokens per second of one static batch."""
    tokens = torch.tensor(prompts(count))
    began = time.perf_counter()
    model.generate(tokens, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, attention_mask=tokens.ne(-1))
    return count * NEW / (time.perf_counter() - began)


def through(generate: Callable[[GenerateRequest, str], Awaitable[int]], count: int) -> Callable[[], Awaitable[float]]:
    """Sampled tokens per second of ``count`` requests at once; no token stops them."""

    async def measure() -> float:
        requests = [
            GenerateRequest(
                request_id=f"r{number}-{time.monotonic_ns()}",
                token_ids=prompt,
                sampling=Sampling(),
                max_tokens=NEW,
                stop_token_ids=[],
            )
            for number, prompt in enumerate(prompts(count))
        ]
        began = time.perf_counter()
        results = await asyncio.gather(*(generate(request, request.request_id) for request in requests))
        assert all(n == NEW for n in results), "a response ended early"
        return count * NEW / (time.perf_counter() - began)

    return measure


def sampled(engine: Generator) -> Callable[[GenerateRequest, str], Awaitable[int]]:
    async def generate(request: GenerateRequest, session: str) -> int:
        return len((await engine.generate(request, session=session)).token_ids)

    return generate


async def median(measure: Callable[[], Awaitable[float]]) -> float:
    """Of some repeats, after one that warms up."""
    await measure()
    return statistics.median([await measure() for _ in range(REPEATS)])


async def in_process(model: Qwen3ForCausalLM, counts: list[int]) -> list[float]:
    engine = LocalEngine(model, max_batch=max(counts), max_length=Shape.model_max_length)
    try:
        return [await median(through(sampled(engine), count)) for count in counts]
    finally:
        engine.close()


def over_http(folder: Path, counts: list[int]) -> list[float]:
    """The engine's own process, asked as any client of vLLM's dialect would ask it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rl_async.rollout_server", "--run", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_ask(f"http://127.0.0.1:{port}", process, counts))
    finally:
        process.terminate()
        process.wait(30)


async def _ask(url: str, process: "subprocess.Popen[bytes]", counts: list[int]) -> list[float]:
    engine = VllmEngine(url)
    try:
        while not await engine.health():
            if process.poll() is not None:
                sys.exit(f"the engine process ended with {process.returncode}")
            await asyncio.sleep(0.2)
    finally:
        await engine.close()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def generate(request: GenerateRequest, _: str) -> int:
            body = {
                "request_id": request.request_id,
                "token_ids": request.token_ids,
                "sampling_params": {"max_tokens": NEW, "temperature": 1.0, "logprobs": 0},
            }
            # without the header of the oldest version that will do: these weights never had one
            async with session.post(f"{url}/inference/v1/generate", json=body) as reply:
                return len((await reply.json())["choices"][0]["token_ids"])

        return [await median(through(generate, count)) for count in counts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64, 256], help="at once")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts: list[int] = arguments.sequences
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = tiny_model(SftConfig(demos_path=""), Shape()).eval()  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        model.save_pretrained(run / "model")
        config = RunConfig(
            model=ModelConfig(path=str(run / "model"), device="cpu"),
            data=DataConfig(path="none"),
            agent=AgentConfig(max_tokens=Shape.model_max_length),
            rollout=RolloutConfig(max_batch_size=max(counts), max_model_len=Shape.model_max_length),
            launcher=LauncherConfig(threads=1),
        )
        (run / "config.yaml").write_text(dump(config))
        limits = []
        for count in counts:
            static(model, count)
            limits.append(statistics.median(static(model, count) for _ in range(REPEATS)))
        inside = asyncio.run(in_process(model, counts))
        http = over_http(run, counts)
    print(
        f"{'sequences':<11}{'static':>10}{'in process':>12}{'ratio':>8}{'over HTTP':>11}{'ratio':>8}   sampled tokens/s"
    )
    for count, limit, a, b in zip(counts, limits, inside, http, strict=True):
        print(f"{count:<11}{limit:>10,.0f}{a:>12,.0f}{a / limit:>8.2f}{b:>11,.0f}{b / limit:>8.2f}")
    if arguments.json:
        rows = list(zip(counts, limits, inside, http, strict=True))
        result = {
            "static_tokens_per_s": {str(n): limit for n, limit, _, _ in rows},
            "in_process_vs_static": {str(n): a / limit for n, limit, a, _ in rows},
            "http_vs_static": {str(n): b / limit for n, limit, _, b in rows},
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
