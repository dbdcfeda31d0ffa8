"""An engine process whose weight updates are SGLang's own code, on the CPU over gloo.

``python -m tests.contracts.sglang.engine WHEEL`` prints its port. SGLang's are the request structs, the session of an
update (SchedulerWeightUpdaterManager), its process group and the buckets (WeightUpdater). Ours is what joins them
(after managers/tp_worker.py, managers/scheduler.py and entrypoints/http_server.py), and a model that keeps tensors.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import uvicorn
import xxhash
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route as ServedRoute

from rl_async.rollout_server.sglang.__main__ import SleepReport
from tests.contracts.sglang.wheel import Route, load, refusal, routes

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"


@dataclass
class Model:
    """Keeps what it is given, as a model's loader does: copied."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.weights.update((name, tensor.clone()) for name, tensor in named)

    def modules(self) -> list[Any]:
        return []

    def named_buffers(self) -> list[Any]:
        return []


class Engine:
    """The scheduler as far as weights go: paused or not, and the name of the weights."""

    def __init__(self, folder: Path) -> None:
        self.structs, self.builtins = (
            load(folder, f"sglang.srt.{n}") for n in ("managers.io_struct", "utils.msgspec_utils")
        )
        self.version, self.paused = "default", False
        self.model = Model()
        updater = load(folder, UPDATER).WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=None,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=lambda **changed: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        runner = SimpleNamespace(weight_updater=updater, check_weights=self._checksums, model=self.model)
        worker = SimpleNamespace(
            model_runner=runner,
            weight_update_runners=lambda: [("target", runner)],
            init_weights_update_group=lambda r: updater.init_weights_update_group(
                r.master_address, r.master_port, r.rank_offset, r.world_size, r.group_name, r.backend
            ),
            destroy_weights_update_group=lambda r: updater.destroy_weights_update_group(r.group_name),
        )
        self.manager = load(folder, MANAGER).SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=SimpleNamespace(weight_update_runners=lambda: [("draft", None)]),
            # On a GPU torch_memory_saver frees and allocates.
            memory_saver_adapter=SimpleNamespace(pause=lambda tag: None, resume=lambda tag: None),
            flush_cache=lambda **options: self.paused,
            is_fully_idle=lambda **options: self.paused,
            scheduler=SimpleNamespace(
                record_weight_version_change=lambda new_version: None, _engine_paused=True, disaggregation_mode=None
            ),
        )

    def _checksums(self, **request: Any) -> dict[str, Any]:
        sizes = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "size": 1}
        place = {"role": "target", "tp_rank": 0, "dp_rank": 0, "pp_rank": 0, "rank": 0, **sizes}
        sums = {
            n: xxhash.xxh3_128_hexdigest(t.view(torch.uint8).numpy().tobytes()) for n, t in self.model.weights.items()
        }
        return {"checksums": sums, "per_gpu_checksum": "", "parallelism_info": place}

    def pause(self, request: Any) -> dict[str, Any]:
        self.paused = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    def resume(self, request: Any) -> dict[str, Any]:
        self.paused = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    def flush(self, request: Any) -> dict[str, Any]:
        return {"success": self.paused, "message": "Flush cache failed."}

    def release(self, request: Any) -> dict[str, Any]:
        self.manager.release_memory_occupation(request)
        return {}

    def allocate(self, request: Any) -> dict[str, Any]:
        self.manager.resume_memory_occupation(request)
        return {}

    def name(self, request: Any) -> dict[str, Any]:
        self.version = request.new_version
        return {"success": True, "message": "", "new_version": self.version}

    def info(self, request: Any) -> dict[str, Any]:
        return {"weight_version": self.version}

    def workers(self, request: Any) -> dict[str, Any]:
        return {"tp_size": 1}

    def checksums(self, request: Any) -> dict[str, Any]:
        output = self.manager.check_weights(request)
        return {
            "success": output.success,
            "message": output.message,
            "ranks": self.builtins.msgspec_to_builtins(output.payload),
        }


def handler(
    engine: Engine, folder: Path, path: str, route: Route, act: Callable[[Any], Any], pool: ThreadPoolExecutor
) -> Any:
    """A route as in http_server.py: the body becomes a struct, what comes back JSON, and a failure the status 400."""

    async def handle(request: Request) -> JSONResponse:
        raw = await request.body()
        body = msgspec.json.decode(raw) if raw else None
        if why := refusal(folder, route, path, body):
            return JSONResponse({"error": why}, 400)
        struct = TypeAdapter(getattr(engine.structs, route.body)).validate_python(body) if route.body else None
        done = await asyncio.get_running_loop().run_in_executor(pool, act, struct)
        content = done if isinstance(done, dict) else {"success": done.success, "message": done.message}
        return JSONResponse(content, 200 if content.get("success", True) else 400)

    return handle


async def main(folder: Path) -> None:
    """Serve until killed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # SGLang has one of its own workers
    engine, served, pool = Engine(folder), routes(folder), ThreadPoolExecutor(1)
    manager = engine.manager
    actions: dict[str, Callable[[Any], Any]] = {
        "/init_weights_update_group": manager.init_weights_update_group,
        "/destroy_weights_update_group": manager.destroy_weights_update_group,
        "/begin_weight_update": manager.begin_weight_update,
        "/update_weights_from_distributed": manager.update_weights_from_distributed,
        "/end_weight_update": manager.end_weight_update,
        "/weights_checker": engine.checksums,
        "/pause_generation": engine.pause,
        "/continue_generation": engine.resume,
        "/flush_cache": engine.flush,
        "/release_memory_occupation": engine.release,
        "/resume_memory_occupation": engine.allocate,
        "/update_weight_version": engine.name,
        "/model_info": engine.info,
        "/server_info": engine.workers,
    }
    app = Starlette(
        routes=[
            ServedRoute(path, handler(engine, folder, path, served[path], act, pool), methods=[*served[path].methods])
            for path, act in actions.items()
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(uvicorn.Config(SleepReport(app), log_level="warning")).serve([listener])


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
