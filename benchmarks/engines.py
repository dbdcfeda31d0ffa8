"""How fast are engines, and what do the agent loop and the pool cost? Sampled tokens per second of the demo's model.

    pool_vs_bare_*                           episodes with tools through agent loop and a worker's pool / the same
                                             conversations from a bare client; 64 at once, on a worker's event loop
    pool_vs_bare_embedded_busy               the same for the embedded engine, beside a process that keeps a core busy
    embedded_busy_vs_alone_tokens_per_s      embedded engine of two threads beside such a process / alone, 64 requests
    embedded_vs_vllm_tokens_per_s            over HTTP, bare client; smallest ratio of 8, 64 and 256 requests at once
    embedded_vs_static_batch_tokens_per_s    engine in this process / one batch of 256 by Transformers' `generate`
    token_checked_vs_open_tokens_per_s       embedded engine, with a token that it checks / without; the smaller of
                                             8 and 64 requests at once
    token_checked_vs_open_tokens_per_cpu_s   the same per CPU time of engine and client, which other work disturbs less

    python -m benchmarks.engines [--vllm PYTHON] [--json FILE]
    python -m benchmarks.engines --credentials [--pairs 60] [--json FILE]     only the last of these

The model is the one that `rl-async launch --config calculator` prepares, and is made if it is missing. Arms that are
compared take turns. With and without a token they do so in slices of a fraction of a second, on one engine process, and
the ratio is the median over pairs of neighbouring slices, so that other work on the machine strikes both alike.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import psutil
import torch
import uvloop
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.processes.busy import busy_process
from benchmarks.processes.engine_process import serving, serving_open
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineLost
from rl_async.launcher.plan.artifacts import needs_preparation
from rl_async.launcher.runs.prepare import prepare
from rl_async.messages import EngineList, EngineRecord, LeasedGroup, Sampling, Task, Version
from rl_async.process.http_auth import bearer
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Generator
from rl_async.rollout_server.embedded.engine_thread import LocalEngine
from rl_async.rollout_server.pool import engine_pool
from rl_async.transfer_queue.dataset import make_sources

PROMPT, NEW = 25, 32  # tokens of the uniform requests
AT_ONCE = (8, 64, 256)
FEW = (8, 64)
CONVERSATIONS, EPISODES = 64, 256
STATIC = 256
REPEATS = 5
V0 = Version(0, 0)

Send = Callable[[GenerateRequest], Awaitable[list[int]]]  # returns the sampled tokens


def uniform_requests(config: RunConfig, count: int) -> list[GenerateRequest]:
    """Return random prompts of PROMPT tokens, which nothing stops before NEW sampled ones."""
    vocabulary = AutoConfig.from_pretrained(config.model.path).vocab_size
    tokens = torch.randint(2, vocabulary, (count, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        GenerateRequest(request_id=f"r{n}", token_ids=t, sampling=Sampling(), max_tokens=NEW, stop_token_ids=[])
        for n, t in enumerate(tokens)
    ]


async def rate(conversations: Sequence[Sequence[GenerateRequest]], send: Send, at_once: int) -> float:
    """Return sampled tokens per second of ``at_once`` conversations, each of which sends its requests in turn.

    The tokens of a request are what it adds to the conversation before it, answers included. So engines know of a
    prompt what they know of an episode's: all that this conversation has said.
    """
    places = asyncio.Semaphore(at_once)

    async def converse(requests: Sequence[GenerateRequest]) -> int:
        history, sampled = list[int](), 0
        async with places:
            for request in requests:
                history += request.token_ids
                answer = await send(msgspec.structs.replace(request, token_ids=history))
                history, sampled = history + answer, sampled + len(answer)
        return sampled

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(converse(requests) for requests in conversations)))
    return tokens / (time.perf_counter() - began)


@contextmanager
def timed(rates: list[float]) -> Iterator[list[int]]:
    """Append to ``rates`` the rate of the tokens that the block counts."""
    tokens: list[int] = []
    began = time.perf_counter()
    yield tokens
    rates.append(sum(tokens) / (time.perf_counter() - began))


class BareClient:
    """The least that a client can do: one POST per request, without pool, versions or streaming."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = f"{url}/inference/v1/generate", session

    async def __call__(self, request: GenerateRequest) -> list[int]:
        body = {
            "request_id": f"{request.request_id}-{time.monotonic_ns()}",
            "token_ids": request.token_ids,
            "sampling_params": {"max_tokens": request.max_tokens, "temperature": 1.0, "logprobs": 0}
            | {"ignore_eos": True},
        }
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=msgspec.json.encode(body), headers=headers) as reply:
            answer = msgspec.json.decode(await reply.read())
        if "choices" not in answer:
            raise EngineLost(f"{self._url}: {answer}")
        sampled: list[int] = answer["choices"][0]["token_ids"]
        assert len(sampled) == request.max_tokens, "an answer ended early"
        return sampled


class RecordingGenerator:
    """Passes requests on and keeps them, by conversation, with exactly the length that was sampled.

    Of a later request's prompt it keeps what was added to the conversation, as ``rate`` takes it.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.requests: dict[str, list[GenerateRequest]] = defaultdict(list)
        self._said: dict[str, int] = defaultdict(int)  # tokens of each conversation so far

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        result = await self._generator.generate(request, session=session)
        added, length = request.token_ids[self._said[session] :], len(result.token_ids)
        exact = msgspec.structs.replace(request, token_ids=added, max_tokens=length, stop_token_ids=[])
        self.requests[session].append(exact)
        self._said[session] = len(request.token_ids) + length
        return result


def lease(config: RunConfig, task: Task, number: int) -> LeasedGroup:
    """Return a lease of a whole group, as a worker gets it."""
    samples = list(range(config.rollout.group_size))
    return LeasedGroup(group_id=number, task=task, samples=samples, attempt=0, partition="train", min_version=V0)


async def pool_against_bare(config: RunConfig, url: str, token: str, bare: BareClient) -> tuple[float, float]:
    """Return median tokens per second of (agent loop and pool, bare client)."""
    record = EngineRecord(engine_id="engine", url=url, kind="embedded", version=V0)
    pool = engine_pool(config.rollout, token)
    pool.update(EngineList(revision=1, engines=[record], published=V0))
    renderer = ChatRenderer(PreTrainedTokenizerFast.from_pretrained(config.model.path))
    tasks, _ = make_sources(config)
    rates: tuple[list[float], list[float]] = ([], [])
    for repeat in range(REPEATS + 1):  # the first warms up
        recorder, places = RecordingGenerator(pool), asyncio.Semaphore(CONVERSATIONS)
        runner = EpisodeRunner(config, renderer, recorder)

        count = EPISODES // config.rollout.group_size
        groups = [lease(config, tasks.next(), repeat * count + n) for n in range(count)]
        episodes = [(group, sample) for group in groups for sample in group.samples]

        async def play(group: LeasedGroup, sample: int, runner: Any = runner, places: Any = places) -> None:
            async with places:
                await runner.run(group, sample)

        with timed(rates[0]) as tokens:
            await asyncio.gather(*(play(*episode) for episode in episodes))
            tokens += [request.max_tokens for sent in recorder.requests.values() for request in sent]
        rates[1].append(await rate(list(recorder.requests.values()), bare, CONVERSATIONS))
    await pool.close()
    return statistics.median(rates[0][1:]), statistics.median(rates[1][1:])


async def pool_when_busy(config: RunConfig, url: str, token: str) -> float:
    """Return tokens per second of agent loop and pool / of a bare client, beside a busy process."""
    async with aiohttp.ClientSession(headers=bearer(token)) as session:
        with busy_process():
            pool, bare = await pool_against_bare(config, url, token, BareClient(url, session))
    return pool / bare


async def busy_against_alone(url: str, token: str) -> float:
    """Return median tokens per second beside a busy process / without; the two take turns."""
    requests = [[request] for request in uniform_requests(load_config("calculator"), CONVERSATIONS)]
    alone, busy = list[float](), list[float]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=bearer(token)) as session:
        bare = BareClient(url, session)
        for _ in range(REPEATS + 1):  # the first warms up
            alone.append(await rate(requests, bare, CONVERSATIONS))
            with busy_process():
                busy.append(await rate(requests, bare, CONVERSATIONS))
    print(f"{'embedded, two threads':34}{statistics.median(alone[1:]):10,.0f}")
    print(f"{'the same beside a busy process':34}{statistics.median(busy[1:]):10,.0f}")
    return statistics.median(busy[1:]) / statistics.median(alone[1:])


async def over_http(config: RunConfig, url: str, token: str) -> tuple[dict[int, float], float, float]:
    """Return tokens per second of uniform requests, by how many at once; of episodes; of the requests of episodes."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2), headers=bearer(token)
    ) as session:
        bare = BareClient(url, session)
        rates: dict[int, list[float]] = {count: [] for count in AT_ONCE}
        requests = [[request] for request in uniform_requests(config, max(AT_ONCE))]
        for _ in range(REPEATS + 1):
            for count in AT_ONCE:
                rates[count].append(await rate(requests[:count], bare, count))
        through_pool, straight = await pool_against_bare(config, url, token, bare)
    return {count: statistics.median(found[1:]) for count, found in rates.items()}, through_pool, straight


class Paired(NamedTuple):
    """With a token to without one: tokens per second of each pair of slices, and per second of CPU time over all."""

    rates: list[float]
    per_cpu_s: float


async def with_and_without_token(engine: tuple[str, str, str, int], at_once: int, pairs: int) -> Paired:
    """Measure both arms in turn. The CPU time is that of the engine's process and of this one."""
    url, token, open_url, pid = engine
    requests = [[request] for request in uniform_requests(load_config("calculator"), 2 * at_once)]
    connectors = [aiohttp.TCPConnector(limit=0) for _ in range(2)]
    processes = [psutil.Process(pid), psutil.Process()]
    async with (
        aiohttp.ClientSession(connector=connectors[0], headers=bearer(token)) as shown,
        aiohttp.ClientSession(connector=connectors[1]) as silent,
    ):
        arms = [BareClient(url, shown), BareClient(open_url, silent)]
        ratios, cpu = list[float](), [0.0, 0.0]
        for arm in arms:  # warms up
            await rate(requests, arm, at_once)
        for pair in range(pairs):
            rates = [0.0, 0.0]
            for arm in (0, 1) if pair % 2 else (1, 0):
                before = cpu_s(processes)
                rates[arm] = await rate(requests, arms[arm], at_once)
                cpu[arm] += cpu_s(processes) - before
            ratios.append(rates[0] / rates[1])
    return Paired(ratios, cpu[1] / cpu[0])


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time that the processes have used, in seconds; it does not count what others use."""
    return sum(used.user + used.system for used in (process.cpu_times() for process in processes))


def credentials(config: RunConfig, pairs: int) -> dict[str, float]:
    """Print and return what checking a token costs; the smallest ratios of few and many requests in flight."""
    found = []
    with tempfile.TemporaryDirectory() as folder, serving_open(config, Path(folder)) as engine:
        for at_once in FEW:
            load, began = os.getloadavg()[0], time.perf_counter()
            paired = uvloop.run(with_and_without_token(engine, at_once, pairs))
            low, median, high = statistics.quantiles(paired.rates, n=4)
            print(
                f"{f'with / without token, {at_once} at once':34}{median:18.3f} ({low:.3f} to {high:.3f}), by CPU "
                f"time {paired.per_cpu_s:.3f}, {pairs} pairs in {time.perf_counter() - began:.0f} s, load {load:.1f}",
                flush=True,
            )
            found.append((median, paired.per_cpu_s))
    per_s, per_cpu_s = map(min, zip(*found))
    return {"token_checked_vs_open_tokens_per_s": per_s, "token_checked_vs_open_tokens_per_cpu_s": per_cpu_s}


async def in_process(config: RunConfig) -> tuple[float, float]:
    """Return median tokens per second of (one static batch, the engine in this process)."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    requests = uniform_requests(config, STATIC)
    tokens = torch.tensor([request.token_ids for request in requests])
    engine = LocalEngine(model, max_batch=STATIC, max_length=config.rollout.max_model_len)

    async def send(request: GenerateRequest) -> list[int]:
        return (await engine.generate(request, session="")).token_ids

    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS + 1):
        with timed(rates[0]) as sampled, torch.inference_mode():
            model.generate(tokens, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, attention_mask=tokens.ne(-1))
            sampled.append(tokens.shape[0] * NEW)
        rates[1].append(await rate([[request] for request in requests], send, STATIC))
    engine.close()
    return statistics.median(rates[0][1:]), statistics.median(rates[1][1:])


def compare(config: RunConfig, vllm: str) -> dict[str, float]:
    """Print and return everything else."""
    static, inside = uvloop.run(in_process(config))
    result = {"embedded_vs_static_batch_tokens_per_s": inside / static}
    print(f"{'':34}{'tokens/s':>10}{'ratio':>8}")
    print(f"{f'static batch of {STATIC}, in process':34}{static:10,.0f}")
    print(f"{'embedded engine, in process':34}{inside:10,.0f}{inside / static:8.2f}")
    pythons = {"embedded": ""} | ({"vllm": vllm} if Path(vllm).exists() else {})
    rates: dict[str, dict[int, float]] = {}
    for kind, python in pythons.items():
        with tempfile.TemporaryDirectory() as folder, serving(kind, config, Path(folder), python) as (url, token):
            rates[kind], pool, bare = uvloop.run(over_http(config, url, token))
            if kind == "embedded":
                result["pool_vs_bare_embedded_busy"] = uvloop.run(pool_when_busy(config, url, token))
        result[f"pool_vs_bare_{kind}"] = pool / bare
        for count, found in rates[kind].items():
            ratio = f"{rates['embedded'][count] / found:8.2f}" if len(rates) > 1 else ""
            print(f"{f'{kind}, HTTP, {count} at once':34}{found:10,.0f}{ratio}")
        print(f"{f'{kind}, episodes, bare client':34}{bare:10,.0f}")
        print(f"{f'{kind}, episodes, agent loop, pool':34}{pool:10,.0f}{pool / bare:8.2f}")
    two = msgspec.structs.replace(config, launcher=msgspec.structs.replace(config.launcher, threads=2))
    with tempfile.TemporaryDirectory() as folder, serving("embedded", two, Path(folder), "") as (url, token):
        result["embedded_busy_vs_alone_tokens_per_s"] = uvloop.run(busy_against_alone(url, token))
    if "vllm" in rates:
        ratios = [rates["embedded"][count] / rates["vllm"][count] for count in AT_ONCE]
        result["embedded_vs_vllm_tokens_per_s"] = min(ratios)
    else:
        print(f"vLLM was not measured: no {vllm}; scripts/install vllm makes one", file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", metavar="PYTHON", help="Python with vLLM")
    parser.add_argument("--credentials", action="store_true", help="measure only what a token costs")
    parser.add_argument("--pairs", type=int, default=60, metavar="N", help="slices with and without a token")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    config = load_config("calculator", ["model.dtype=float32", "rollout.max_batch_size=256"])
    if needs_preparation(config):
        prepare(config, print)
    torch.set_num_threads(1)
    result = credentials(config, arguments.pairs)
    if not arguments.credentials:
        result |= compare(config, arguments.vllm)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
