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
from typing import Literal

import aiohttp

from rl_async.configs.engines import EngineKind
from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import Quantization, RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import LoraConfig, TrainerConfig, WeightSyncConfig
from rl_async.launcher.child_process import Lifeline
from rl_async.launcher.plan.memory import model_size
from rl_async.launcher.plan.planning import HOST, PortWish, hold_ports, plan
from rl_async.process.http_auth import bearer, make_tokens, run_token
from rl_async.process.role import LIFELINE_FD
from rl_async.rollout_server.api import EMPTY, GenerateRequest, GenerateResult, join
from rl_async.rollout_server.vllm.client import VllmEngine
from tests.conftest import vllm_python
from tests.support.forked import Forked

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
    """An engine of this kind, started as the launcher does; with ``eager`` vLLM compiles nothing, and starts sooner.

    ``ranks`` are keys of ``rollout``, such as tensor_parallel. With ``lora`` it loads adapters by itself. ``flags``
    are further ones of vLLM. An embedded
    engine is ``forked``, which saves the import of torch, but has the command line and the environment of the process
    that it was forked from.
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
    process: subprocess.Popen[bytes] | Forked
    closing = ExitStack()
    if kind == "embedded" and forked:
        command = spec.command(ports)
        module, *arguments = command[command.index("-m") + 1 :]
        process = Forked(module, *arguments, environment=spec.environment(ports), log=log, session=True)
    else:
        # As under a launcher, the engine ends however this process does.
        lifeline = closing.enter_context(Lifeline())
        with log.open("wb") as output:
            process = subprocess.Popen(
                spec.command(ports),
                env=os.environ | spec.environment(ports) | {LIFELINE_FD: str(lifeline.read_end)},
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


async def _healthy(url: str, process: "subprocess.Popen[bytes] | Forked", start_s: float) -> bool:
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
