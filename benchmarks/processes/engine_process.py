"""An engine process with weights in it, as a run would start it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM

from rl_async.configs.load import dump
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.planning import PortWish, assign_ports, environment, plan
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.process.http_auth import make_tokens, run_token
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.transports.ipc import SharedMemorySender
from tests.support.weights import make_buckets

START_S = 240.0


@contextmanager
def serving(kind: str, config: RunConfig, folder: Path, python: str) -> Iterator[tuple[str, str]]:
    """Start an engine of this kind, with the model's weights as version 0.0, and yield its URL and its token.

    ``python`` is ``rollout.python``.
    """
    rollout = msgspec.structs.replace(config.rollout, engine=kind, python=python)
    config = msgspec.structs.replace(config, rollout=rollout)
    spec = plan(config, folder).engines[0]
    ports = assign_ports((PortWish(spec.name),))
    url = f"http://127.0.0.1:{ports[spec.name]}"
    with _started(config, folder, spec.command(ports), spec.environment(ports), url) as (token, _):
        yield url, token


@contextmanager
def serving_open(config: RunConfig, folder: Path) -> Iterator[tuple[str, str, str, int]]:
    """Start the embedded engine as ``serving`` does; yield its URL, its token, another URL that needs none, its pid."""
    ports = assign_ports((PortWish("closed"), PortWish("open")))
    flags = ("--run", str(folder), "--port", str(ports["closed"]), "--open-port", str(ports["open"]))
    url, open_url = (f"http://127.0.0.1:{ports[name]}" for name in ("closed", "open"))
    command = [sys.executable, "-m", "benchmarks.processes.open_engine", *flags]
    with _started(config, folder, command, environment(config, "engine"), url) as (token, pid):
        yield url, token, open_url, pid


@contextmanager
def _started(
    config: RunConfig, folder: Path, command: list[str], variables: Mapping[str, str], url: str
) -> Iterator[tuple[str, int]]:
    """Run an engine of this config in the run folder ``folder``, with the model's weights; yield its token and pid."""
    (folder / "config.yaml").write_text(dump(config))
    make_tokens(folder / "keys")
    token = run_token(folder, "engines")
    log = folder / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
    try:
        if not asyncio.run(_load(url, token, config.model.path, process)):
            sys.exit(f"the engine did not start:\n{log.read_text()[-3000:]}")
        yield token, process.pid
    finally:
        process.terminate()
        process.wait(60)


async def _load(url: str, token: str, model_path: str, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until the engine answers and send it the weights. Returns False if its process ended before that."""
    engine = VllmEngine(url, token=token)
    try:
        async with asyncio.timeout(START_S):
            while not await engine.health():
                if process.poll() is not None:
                    return False
                await asyncio.sleep(0.2)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        sender = SharedMemorySender()
        await engine.pause("keep")
        await engine.init_transfer(InitInfo(backend="ipc"))
        await engine.start_update()
        for bucket in make_buckets(model.named_parameters(), 1 << 20):
            await engine.update(sender.stage(bucket))
        sender.close()
        await engine.finish_update(Version(0, 0))
        await engine.resume()
        return True
    finally:
        await engine.close()


class SingleEngineDirectory:
    """An EngineDirectory of one engine, without a queue."""

    def __init__(self, url: str) -> None:
        self.record = EngineRecord(engine_id="engine", url=url, kind="embedded")

    @asynccontextmanager
    async def open(self) -> AsyncIterator["SingleEngineDirectory"]:
        yield self

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        await asyncio.sleep(wait_s)
        return EngineList(revision=0, engines=[self.record], published=Version())

    async def publish(self, version: Version, engines: list[str]) -> None:
        self.record = msgspec.structs.replace(self.record, version=version)

    async def confirm(self, engine_id: str, version: Version) -> None: ...

    async def remove_engine(self, engine_id: str, reason: str) -> None:
        raise RuntimeError(reason)
