"""An engine process with weights in it, as a run would start it."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import torch
import uvicorn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from rl_async.configs.load import dump
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.planning import PortWish, assign_ports, environment, plan
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.process.http_auth import make_tokens, run_token
from rl_async.process.role import bind
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.server import EngineServer
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.transports import SharedMemorySender
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


def serve_in_thread(model: Qwen3ForCausalLM) -> tuple[EngineThread, int]:
    """Serve an engine with this model from this process, to everybody on loopback; return it and its port."""
    engine = EngineThread(EngineCore(model, max_batch=1, max_length=64), on_crash=lambda _: sys.exit(1))
    listener = bind("127.0.0.1", 0, "port")
    settings = uvicorn.Config(
        EngineServer(engine, "benchmark").app, log_level="warning", lifespan="off", access_log=False
    )
    threading.Thread(target=uvicorn.Server(settings).run, kwargs={"sockets": [listener]}, daemon=True).start()
    return engine, int(listener.getsockname()[1])


class StandaloneDirectory:
    """An EngineDirectory without a queue, of engines with these ids at these URLs."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self.records: dict[str, EngineRecord] = {}
        self._revision, self._changed = 0, asyncio.Event()
        for engine_id, url in urls.items():
            self.add(engine_id, url)

    def add(self, engine_id: str, url: str) -> None:
        """Register an engine, which serves no version yet."""
        self.records[engine_id] = EngineRecord(engine_id=engine_id, url=url, kind="embedded")
        self._bump()

    def remove(self, engine_id: str) -> None:
        """Take an engine out, which goes on serving its version."""
        del self.records[engine_id]
        self._bump()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["StandaloneDirectory"]:
        yield self

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        if self._revision <= after:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        return EngineList(revision=self._revision, engines=list(self.records.values()), published=Version())

    async def publish(self, version: Version, engines: list[str]) -> None:
        for engine_id in engines:
            await self.confirm(engine_id, version)

    async def confirm(self, engine_id: str, version: Version) -> None:
        self.records[engine_id] = msgspec.structs.replace(self.records[engine_id], version=version)
        self._bump()

    async def remove_engine(self, engine_id: str, reason: str) -> None:
        raise RuntimeError(reason)

    def _bump(self) -> None:
        self._revision += 1
        self._changed.set()
