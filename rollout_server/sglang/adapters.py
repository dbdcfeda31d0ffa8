"""LoRA adapters in an SGLang server (``--enable-lora``): every request samples with those that were published last.

SGLang loads adapters from a folder, under a name that requests give (``/load_lora_adapter``). The middleware here
receives a publication in the server's process, over any of our transports on the host, writes PEFT's files, has SGLang
load them in place of the earlier ones, and gives their name to requests. Before the first publication requests sample
from the base.

A request keeps its adapter to its end, so none may run when adapters are replaced: the client pauses by aborting
(``SglangEngine.pause``), and what was sampled goes on with the new ones. Thus SGLang's versions of tokens are right.
"""

import asyncio
import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file
from starlette.requests import Request
from starlette.responses import JSONResponse

from rl_async.concurrency import in_daemon_thread
from rl_async.errors import WeightSyncError
from rl_async.files import UNDECODABLE
from rl_async.model_files import weights_name
from rl_async.process.http_auth import App, Receive, Scope, Send, with_body
from rl_async.weight_sync.buckets import Pairs
from rl_async.weight_sync.protocol import InitTransferBody, UpdateWeightsBody
from rl_async.weight_sync.receiver import AdapterLoader, Assembler, WeightReceiver

NAME = "published"
PUBLICATION = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


class PublishedAdapters:
    """ASGI middleware around the server of the model in the folder ``model``."""

    def __init__(self, app: App, model: Path) -> None:
        self._app = app
        # The files are read once, before the first publication asks for their name.
        base = in_daemon_thread(lambda: weights_name(model), "weights-name")
        # With this loader the receiver takes nothing but adapters.
        self._receiver = WeightReceiver(Assembler(lambda tensors: None), "cpu", AdapterLoader(base.result, self._write))
        self._root = tempfile.mkdtemp(prefix="rl-async-adapters-")
        atexit.register(shutil.rmtree, self._root, ignore_errors=True)
        # The files of the adapters that SGLang has loaded, and of those that it is to load next.
        self._folder: Path | None = None
        self._next: Path | None = None
        # Set once SGLang was first asked to load adapters. From then on no request may be answered by the base, also
        # while they are replaced: SGLang looks the name up when its pause is over, and refuses one that it lacks.
        self._named = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the routes of a publication, as vLLM has them, name the adapters in requests, and pass the rest on."""
        path = scope.get("path") if scope.get("method") == "POST" else None
        if path == "/generate" and self._named:
            body = await Request(scope, receive).body()
            try:
                named = msgspec.json.encode(msgspec.json.decode(body, type=dict[str, Any]) | {"lora_path": NAME})
            except UNDECODABLE as error:
                return await JSONResponse({"error": str(error)}, 400)(scope, receive, send)
            return await self._app(*with_body(scope, receive, named), send)
        if path not in PUBLICATION:
            return await self._app(scope, receive, send)
        answer = await self._publication(scope, path, await Request(scope, receive).body())
        await answer(scope, receive, send)

    async def _publication(self, scope: Scope, path: str, body: bytes) -> JSONResponse:
        receiver = self._receiver
        try:
            if path == "/init_weight_transfer_engine":
                await asyncio.to_thread(receiver.init, msgspec.json.decode(body, type=InitTransferBody).init_info)
            elif path == "/start_weight_update":
                receiver.start()
            elif path == "/update_weights":
                await asyncio.to_thread(receiver.update, msgspec.json.decode(body, type=UpdateWeightsBody).update_info)
            else:
                await asyncio.to_thread(receiver.finish)
                await self._replace(scope)
        except UNDECODABLE as error:
            return JSONResponse({"error": str(error)}, 400)
        except WeightSyncError as error:
            return JSONResponse({"error": str(error)}, 500)
        return JSONResponse({})

    async def _replace(self, scope: Scope) -> None:
        """Have SGLang forget the earlier adapters, and load those that the publication wrote."""
        if self._next is None:
            raise WeightSyncError("the publication ended without adapters")
        if self._named:
            # An earlier publication may have failed before or after this. SGLang loads no name that it still has.
            await self._refusal(scope, "/unload_lora_adapter", {"lora_name": NAME})
        self._named = True
        loads = {"lora_name": NAME, "lora_path": str(self._next)}
        if refusal := await self._refusal(scope, "/load_lora_adapter", loads):
            raise WeightSyncError(refusal)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder)
        self._folder, self._next = self._next, None

    async def _refusal(self, scope: Scope, path: str, body: dict[str, str]) -> str:
        """POST to one of SGLang's own routes, behind the guards that this request has passed.

        Returns what SGLang answered if it refused, else nothing.
        """
        answer: list[Any] = []

        async def send(message: Any) -> None:
            answer.append(message)

        async def nothing() -> Any:
            return {"type": "http.disconnect"}

        asked = {**scope, "path": path, "raw_path": path.encode(), "headers": [(b"content-type", b"application/json")]}
        await self._app(*with_body(asked, nothing, msgspec.json.encode(body)), send)
        if answer[0]["status"] == 200:
            return ""
        said = b"".join(message.get("body", b"") for message in answer[1:]).decode(errors="replace")
        return f"SGLang answered {path} with {answer[0]['status']}: {said:.500}"

    def _write(self, pairs: Pairs, scale: float) -> None:
        """Write PEFT's files. B already includes the scale; alpha is the rank, so that SGLang multiplies by 1."""
        ranks = {len(low) for low, _ in pairs.values()}
        if len(ranks) != 1:
            raise WeightSyncError(f"SGLang loads adapters of one rank, and these have {sorted(ranks)}")
        (rank,) = ranks
        if self._next is not None:
            # SGLang did not take those.
            shutil.rmtree(self._next)
        self._next = Path(tempfile.mkdtemp(dir=self._root))
        kinds = sorted({layer.rpartition(".")[2] for layer in pairs})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": kinds, "bias": "none"}
        (self._next / "adapter_config.json").write_text(json.dumps(config))
        named = {f"base_model.model.{layer}.lora_A.weight": low.contiguous() for layer, (low, _) in pairs.items()}
        named |= {f"base_model.model.{layer}.lora_B.weight": high * scale for layer, (_, high) in pairs.items()}
        save_file(named, self._next / "adapter_model.safetensors")
