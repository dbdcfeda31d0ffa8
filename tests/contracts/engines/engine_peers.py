"""Real engines for the contract tests: processes on free ports, ended by pid."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from rl_async.configs.engines import EngineKind
from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import Quantization, RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import LoraConfig, TrainerConfig, WeightSyncConfig
from rl_async.launcher.plan.memory import model_size
from rl_async.launcher.plan.planning import HOST, PortWish, hold_ports, plan
from rl_async.launcher.supervisor import Lifeline
from rl_async.messages import EngineRecord, Version
from rl_async.process.http_auth import bearer, make_tokens, run_token
from rl_async.process.role import LIFELINE_FD
from rl_async.rollout_server.api import EMPTY, GenerateRequest, GenerateResult, join
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.protocol import InitInfo, TransportName
from rl_async.weight_sync.transports import SharedMemorySender
from tests.conftest import vllm_python
from tests.contracts.weights.test_transport import Directory
from tests.support.forked import Forked
from tests.support.forked_vllm import FORKING, ForkedVllm
from tests.support.rounding import PlainPass
from tests.support.weights import TrainerRanks, make_buckets

Dtype = Literal["float32", "bfloat16"]

START_S = {"embedded": 150.0, "vllm": 400.0}
MAX_LENGTH = 2560
ATTEMPTS = 50  # at catching requests in their middle, on busy cores
EAGER = ("--enforce-eager",)
ONE_RANK: Mapping[str, int] = {}


@dataclass(frozen=True)
class Peer:
    """A running engine."""

    kind: EngineKind
    url: str
    group: int  # of its processes: whatever the engine started is in it
    token: str
    log: Path
    ranks: Mapping[str, int]
    dtype: Dtype

    def client(self, max_coalesced: int = 1, lineage: int | None = None) -> VllmEngine:
        """A client with the run's token; the fixture ``connect`` makes those that a test has no need to close."""
        return VllmEngine(self.url, max_coalesced=max_coalesced, lineage=lineage, token=self.token)


@contextmanager
def running(
    kind: EngineKind,
    model: Path,
    folder: Path,
    *,
    batch: int = 8,
    model_length: int = MAX_LENGTH,
    eager: bool = False,
    ranks: Mapping[str, int] = ONE_RANK,
    quantization: Quantization = "none",
    dtype: Dtype = "float32",
    lora: LoraConfig | None = None,
    flags: Sequence[str] = (),
    forked: bool = True,
) -> Iterator[Peer]:
    """An engine of this kind, started as the launcher does.

    ``ranks`` are keys of ``rollout``, such as tensor_parallel. With ``lora`` it loads adapters by itself. ``flags``
    are further ones of vLLM. With ``eager`` vLLM compiles nothing, and starts sooner. ``forked`` saves imports:
    vLLM is forked and forks its workers, and an embedded engine imports no torch. The command line, and an embedded
    engine's environment, are then those of the process that it was forked from.
    """
    rollout = RolloutConfig(
        engine=kind,
        python=vllm_python() if kind == "vllm" else "",
        max_batch_size=batch,
        max_model_len=model_length,
        engine_args=(*(EAGER if eager and kind == "vllm" else ()), *flags),
        quantization=quantization,
        **ranks,
    )
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype=dtype),
        data=DataConfig(path="none"),
        rollout=rollout,
        trainer=TrainerConfig(lora=lora),
        weight_sync=WeightSyncConfig(adapters="load" if lora else "auto"),
    )
    (folder / "config.yaml").write_text(dump(config))
    make_tokens(folder / "keys")
    spec = plan(config, folder, size=model_size(config)).engines[0]
    (held,) = hold_ports(HOST, (PortWish(spec.name),))  # until the engine's end: vLLM listens minutes after it began
    ports = {spec.name: held.getsockname()[1]}
    log = folder / f"{kind}.log"
    process: subprocess.Popen[bytes] | Forked | ForkedVllm
    closing = ExitStack()
    if kind == "embedded" and forked:
        command = spec.command(ports)
        module, *arguments = command[command.index("-m") + 1 :]
        process = Forked(module, *arguments, environment=spec.environment(ports), log=log, session=True)
    else:
        # As under a launcher, the engine ends however this process does.
        lifeline, environment = closing.enter_context(Lifeline()), os.environ | spec.environment(ports)
        if kind == "vllm" and forked and eager:
            process = ForkedVllm(spec.command(ports), FORKING | environment, log, LIFELINE_FD, lifeline.read_end)
        else:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    spec.command(ports),
                    env=environment | {LIFELINE_FD: str(lifeline.read_end)},
                    pass_fds=(lifeline.read_end,),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
    try:
        url = f"http://127.0.0.1:{ports[spec.name]}"
        if not asyncio.run(_healthy(url, process, START_S[kind])):
            print(log.read_text()[-4000:], file=sys.stderr)
            raise AssertionError(f"the {kind} engine did not start")
        yield Peer(kind, url, process.pid, run_token(folder, "engines"), log, ranks, dtype)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):  # what the engine started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        closing.close()
        held.close()


async def _healthy(url: str, process: "subprocess.Popen[bytes] | Forked | ForkedVllm", start_s: float) -> bool:
    """Return whether the engine answered its health probe in time."""
    client, deadline = VllmEngine(url), time.monotonic() + start_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if await client.health():
                return True
            await asyncio.sleep(0.1)
        return False
    finally:
        await client.close()


@asynccontextmanager
async def sampling(engine: VllmEngine, *requests: GenerateRequest) -> AsyncIterator[list[asyncio.Task[GenerateResult]]]:
    """Yield the requests' tasks when each has its first tokens and none its last."""
    for _ in range(ATTEMPTS):
        begun = [asyncio.Event() for _ in requests]
        tasks = [asyncio.create_task(_stream(engine, *pair)) for pair in zip(requests, begun, strict=True)]
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(first.wait() for first in begun))
            if any(task.done() for task in tasks):  # this process was too slow to see the middle of an answer
                await asyncio.gather(*tasks)
                continue
            yield tasks
            return
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
    raise AssertionError(f"{ATTEMPTS} times an answer was over before all had begun")


@asynccontextmanager
async def paused(engine: VllmEngine, *requests: GenerateRequest) -> AsyncIterator[list[asyncio.Task[GenerateResult]]]:
    """Yield the requests' tasks when the engine is paused and holds each of them in the middle of its answer."""
    for _ in range(ATTEMPTS):
        async with sampling(engine, *requests) as tasks:
            await engine.pause("keep")
            if (await engine.load()).requests == len(requests):
                yield tasks
                return
            await engine.resume()  # the pause came too late
            await asyncio.gather(*tasks)
    raise AssertionError(f"{ATTEMPTS} times an answer was over before the engine was paused")


async def _stream(engine: VllmEngine, request: GenerateRequest, first: asyncio.Event) -> GenerateResult:
    """Return the whole answer; ``first`` is set at its first tokens."""
    done = EMPTY
    async for part in engine.stream(request):
        done = join(done, part)
        if not first.is_set():
            first.set()
            await asyncio.sleep(0.001)  # so that who waits for it looks before the rest is read, which may be there
    return done


async def metric(peer: Peer, name: str) -> float:
    """Return the value of one of the engine's Prometheus metrics, summed over copies of the model."""
    return sum(await copies_metric(peer, name))


async def copies_metric(peer: Peer, name: str) -> list[float]:
    """Return the values of one of the engine's Prometheus metrics, one for each copy of the model."""
    async with (
        aiohttp.ClientSession(headers=bearer(peer.token)) as session,
        session.get(f"{peer.url}/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    return [float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name]


# Weights of the engine contract: read from a model folder, sent to engines, and applied here for comparison.


BUCKET_BYTES = 1 << 12


def scaled(folder: Path, scale: float = 1.0) -> Any:
    """The folder's model with its matrices scaled, float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() == 2 else 1.0)
    return model


def tensors(folder: Path, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    """The parameters of ``scaled``."""
    return [(name, parameter.detach()) for name, parameter in scaled(folder, scale).named_parameters()]


async def send(
    client: VllmEngine, weights: list[tuple[str, torch.Tensor]], version: Version, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """A full update over shared memory, with requests in flight kept."""
    buckets: list[Bucket] = list(make_buckets(weights, bucket_bytes))  # what vLLM fuses comes in several of them
    assert any(bucket.info.starts for bucket in buckets), "no parameter was cut"
    await client.pause("keep")
    await deliver(client, buckets, version)
    await client.resume()


async def deliver(client: VllmEngine, buckets: Sequence[Bucket], version: Version) -> None:
    """Buckets over shared memory to a paused engine, as one update."""
    await client.init_transfer(InitInfo(backend="ipc"))
    await client.start_update()
    sender = SharedMemorySender()
    try:
        for bucket in buckets:
            await client.update(sender.stage(bucket))
            sender.unstage()
    finally:
        sender.close()
    await client.finish_update(version)


def publish(
    peer: Peer, named: Mapping[str, torch.Tensor], version: Version, ranks: int, transport: TransportName, folder: Path
) -> int:
    """One publication by the trainer's coordinator, from the shards of so many ranks; the bytes that it sent."""
    directory = Directory()
    directory.add(EngineRecord(engine_id="e", url=peer.url, kind=peer.kind))
    sync = WeightSyncConfig(way=transport, folder=str(folder / "weights"), timeout_s=100, bucket_bytes=BUCKET_BYTES)
    with (
        TrainerRanks(named, ranks, sync) as trainer,
        WeightCoordinator(directory.open, lambda _: peer.client(), sync) as coordinator,
    ):
        report = coordinator.publish(version, trainer.weights(named))
    assert report.failures == []
    return report.nbytes


def log_probabilities(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log-softmax [T, V] of a plain forward pass over the whole sequence."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)


def differences(model: Any, request: GenerateRequest, got: GenerateResult) -> torch.Tensor:
    """|engine - plain forward pass| per sampled token, under the request's temperature."""
    ids, start = request.token_ids + got.token_ids, len(request.token_ids)
    expected = log_probabilities(model, ids, request.sampling.temperature)[range(start - 1, len(ids) - 1), ids[start:]]
    return (expected - torch.tensor(got.logprobs)).abs()


def errors(model: Any, request: GenerateRequest, got: GenerateResult) -> torch.Tensor:
    """Errors of an engine's log-probabilities against float64, as multiples of what rounding explains."""
    plain = model if isinstance(model, PlainPass) else PlainPass(model)
    ids = request.token_ids + got.token_ids
    return plain.errors(ids, got.logprobs, request.sampling.temperature or 1.0)
