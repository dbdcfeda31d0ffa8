"""An engine process for the weight-transport tests: the weight routes over HTTP and a WeightReceiver, nothing else.

``python -m tests.contracts.weights.engine [--fault kill|stop --at N]`` prints its port. The fault strikes at the N-th
bucket (from 1), before it is received.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import Callable

import msgspec
import torch
from aiohttp import web

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.protocol import FinishUpdateBody, InitTransferBody, UpdateWeightsBody
from rl_async.weight_sync.receiver import Assembler, WeightReceiver

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Engine:
    """The state of one engine: its weights, its version, whether it is paused."""

    def __init__(self, fault: str | None, at: int) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.receiver = WeightReceiver(Assembler(lambda named: self.weights.update((n, t.clone()) for n, t in named)))
        self.version: str | None = None
        self.paused = False
        self.buckets, self.fault, self.at = 0, fault, at

    async def init(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=InitTransferBody)
        return await self._run(lambda: self.receiver.init(body.init_info))

    async def update(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=UpdateWeightsBody)
        assert self.paused or body.update_info.hold == "stage"
        self.buckets += 1
        if self.fault and self.buckets == self.at:
            os.kill(os.getpid(), FAULTS[self.fault])
        return await self._run(lambda: self.receiver.update(body.update_info))

    async def finish(self, request: web.Request) -> web.Response:
        assert self.paused
        self.version = msgspec.json.decode(await request.read(), type=FinishUpdateBody).weight_version
        return await self._run(self.receiver.finish)

    async def pause(self, request: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({})

    async def start(self, request: web.Request) -> web.Response:
        self.receiver.start()
        return web.json_response({})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text='vllm:engine_sleep_state{sleep_state="awake"} 1\n')

    async def state(self, request: web.Request) -> web.Response:
        sums = {name: float(tensor.double().sum()) for name, tensor in self.weights.items()}
        return web.json_response({"paused": self.paused, "version": self.version, "sums": sums})

    async def _run(self, work: Callable[[], None]) -> web.Response:
        try:
            await asyncio.get_running_loop().run_in_executor(None, work)
        except WeightSyncError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.json_response({})


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=list(FAULTS))
    parser.add_argument("--at", type=int, default=0)
    arguments = parser.parse_args()
    engine = Engine(arguments.fault, arguments.at)
    app = web.Application()
    for path, handler in {
        "/init_weight_transfer_engine": engine.init,
        "/pause": engine.pause,
        "/start_weight_update": engine.start,
        "/update_weights": engine.update,
        "/finish_weight_update": engine.finish,
        "/resume": engine.resume,
    }.items():
        app.router.add_post(path, handler)
    app.router.add_get("/weight_info", engine.info)
    app.router.add_get("/get_world_size", engine.world_size)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_get("/state", engine.state)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
