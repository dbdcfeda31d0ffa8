"""The engine's thread: runs iterations, and executes commands between them, so that nothing races with a forward pass.

Consumes submitted sequences and commands; produces finished sequences (``deliver``) and results of commands. Waits for
a command when there is nothing to decode, and while paused or asleep. Unblocked by ``submit``, ``call`` and ``stop``.
``LocalEngine`` wraps such a thread as a Generator in the caller's process, without a server.

A model whose weights are in 8 bits is quantised when it is loaded and in every update: the matrices of decoder layers,
for each output channel with a float32 scale, its largest weight over the largest number of the format. The quantisation
is weight-only: activations and products have the model's dtype. Routers, embeddings, norms and the last layer are not
quantised.
"""

import asyncio
import concurrent.futures
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import linear

from rl_async.errors import DataError, EngineLost, EngineRejected, SchemaRejected, WeightSyncError
from rl_async.messages import Version, VersionRun
from rl_async.pictures import PictureProcessor
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard
from rl_async.rollout_server.embedded.core import EngineCore, Sequence, place_images
from rl_async.torch_shared import DTYPES, give_back, quantize
from rl_async.weight_sync.buckets import HIGH, LOW, Pairs, Piece
from rl_async.weight_sync.layout import single
from rl_async.weight_sync.receiver import Assembler

# The suffix that turns a parameter's name into that of its scales.
SCALES = "_scales"


def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [N, columns] by a quantised matrix [rows, columns] with scales [rows, 1]. Returns [N, rows]."""
    # The conversion is exact, since even bfloat16 represents all numbers of the format.
    return (linear(x, weight.to(x.dtype)) * scales.mT).to(x.dtype)


class QuantizedLinear(nn.Module):
    """A linear layer with a quantised weight."""

    weight: nn.Parameter
    weight_scales: Tensor

    def __init__(self, dense: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        _hold(self, dense, "weight", dtype)
        self.bias = dense.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [..., rows]."""
        out = product(x, self.weight, self.weight_scales)
        return out if self.bias is None else out + self.bias


class QuantizedExperts(nn.Module):
    """The experts of a layer as Transformers 5 stacks them, quantised."""

    gate_up_proj: nn.Parameter
    gate_up_proj_scales: Tensor
    down_proj: nn.Parameter
    down_proj_scales: Tensor

    def __init__(self, dense: Any, dtype: torch.dtype) -> None:
        super().__init__()
        _hold(self, dense, "gate_up_proj", dtype)
        _hold(self, dense, "down_proj", dtype)
        self.act_fn = dense.act_fn

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts ``chosen`` [N, k] of ``hidden`` [N, H], with ``weights`` [N, k]."""
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            row, rank = torch.where(chosen == expert)
            gate, up = product(hidden[row], self.gate_up_proj[expert], self.gate_up_proj_scales[expert]).chunk(2, -1)
            part = product(self.act_fn(gate) * up, self.down_proj[expert], self.down_proj_scales[expert])
            out.index_add_(0, row, (part * weights[row, rank, None]).to(out.dtype))
        return out


def _hold(module: nn.Module, dense: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Register the parameter ``name`` of ``dense`` in ``module``, quantised and with its scales."""
    numbers, scales = quantize(getattr(dense, name).detach(), dtype)
    module.register_parameter(name, nn.Parameter(numbers, requires_grad=False))
    module.register_buffer(name + SCALES, scales)


def quantize_layers(model: Any, quantization: str) -> None:
    """Quantise the matrices of a model's decoder layers in place. ``quantization`` is a key of DTYPES.

    Beside the model, this needs the memory of one quantised layer.
    """
    dtype = DTYPES[quantization]
    parents = (parent for layer in model.get_decoder().layers for parent in list(layer.modules()))
    for parent in parents:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, QuantizedLinear(child, dtype))
            elif isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                setattr(parent, name, QuantizedExperts(child, dtype))


def named_scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales [rows, 1] of quantised weights, by the names of these weights in updates."""
    buffers = ((name.removesuffix(SCALES), scales) for name, scales in model.named_buffers() if name.endswith(SCALES))
    return single(buffers)


class Requantizer:
    """Quantises the weights of an update, each when its last piece has arrived, since a scale covers a whole row.

    It therefore holds one incomplete weight. ``name in requantizer`` says whether a weight is quantised.
    """

    def __init__(self, model: nn.Module) -> None:
        self._scales = dict(named_scales(model))
        self._complete: list[tuple[str, Tensor]] = []
        self._assemble = Assembler(self._complete.extend)

    def __contains__(self, name: str) -> bool:
        return name in self._scales

    def store(self, piece: Piece, weight: Tensor) -> None:
        """Add the next piece of ``weight``. Raises WeightSyncError for a piece out of order."""
        self._assemble([piece])
        while self._complete:
            name, tensor = self._complete.pop()
            numbers, scales = quantize(tensor.to(weight.device), weight.dtype)
            weight.copy_(numbers)
            self._scales[name].copy_(scales)


class Adapters:
    """The adapters of ``model``, none at first. Not thread-safe; they must not change during a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._pairs: Pairs = {}

    def load(self, pairs: Pairs, scale: float) -> None:
        """Copy these adapters, by their layers' names, in place of the earlier ones.

        Raises WeightSyncError, and keeps the earlier ones, if a layer is missing or of another shape.
        """
        layers = dict(self._model.named_modules())
        for name, (low, high) in pairs.items():
            weight = getattr(layers.get(name), "weight", None)
            if weight is None:
                raise WeightSyncError(f"the engine's model has no layer {name!r} for an adapter")
            if tuple(weight.shape) != (high.shape[0], low.shape[1]) or low.shape[0] != high.shape[1]:
                raise WeightSyncError(
                    f"{name} has shape {list(weight.shape)}, its adapter A {list(low.shape)} and B {list(high.shape)}"
                )
        for hook in self._hooks:
            hook.remove()
        device = next(self._model.parameters()).device
        self._pairs = {
            name: (low.to(device, copy=True), high.to(device, copy=True)) for name, (low, high) in pairs.items()
        }
        self._hooks = [
            layers[name].register_forward_hook(partial(_add, low=low, high=high, scale=scale))
            for name, (low, high) in self._pairs.items()
        ]

    def named(self) -> dict[str, Tensor]:
        """Return all A and B under the names by which they travel."""
        named: dict[str, Tensor] = {}
        for name, (low, high) in self._pairs.items():
            named |= {name + LOW: low, name + HIGH: high}
        return named


def _add(layer: nn.Module, inputs: tuple[Tensor], output: Tensor, *, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """Add scale B A x to a layer's output [..., out]; ``inputs`` holds x [..., in]."""
    return output.add(linear(linear(inputs[0].to(low.dtype), low), high), alpha=scale).to(output.dtype)


T = TypeVar("T")
log = logging.getLogger("rl_async.engine")
NO_ADAPTERS: Mapping[str, Tensor] = MappingProxyType({})


class EngineThread:
    """An EngineCore in its own thread. All methods may be called from any thread.

    ``on_crash`` is called in that thread when an iteration fails; nothing is decoded afterwards.
    """

    def __init__(self, core: EngineCore, on_crash: Callable[[Exception], None]) -> None:
        self.core, self._on_crash = core, on_crash
        self.paused = False
        self._weights_changed = False
        self._requantizer = Requantizer(core.model)
        self._adapters = Adapters(core.model)
        self._cache_asleep = False
        # The shapes of the parameters while their memory is freed.
        self._shapes: dict[str, torch.Size] = {}
        # Weights that are allocated again, but whose values have not been sent yet.
        self._unsent: set[str] = set()
        self._condition = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._drained: list[concurrent.futures.Future[None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    @property
    def asleep(self) -> bool:
        """Whether the memory of the cache or of the weights is freed."""
        return self._cache_asleep or bool(self._shapes)

    def submit(self, *sequences: Sequence) -> None:
        """Queue sequences that ``core.refusal`` has accepted, all in the same iteration."""

        def command() -> None:
            for sequence in sequences:
                self.core.add(sequence)

        self._enqueue(command)

    def call(self, action: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Run ``action`` in the engine's thread between two iterations."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            # Raised where the result is awaited.
            except Exception as error:
                future.set_exception(error)

        self._enqueue(command)
        return future

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._condition:
            if self._stopping:
                raise EngineLost("the engine has stopped")
            self._commands.append(command)
            self._condition.notify()

    def stop(self) -> None:
        """Stop the thread, dropping sequences in flight."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(10)

    def abort(self, which: str | Sequence | None) -> "concurrent.futures.Future[int]":
        """Finish the sequences of a request id, a single one, or all for None, and deliver their tokens so far.

        The result is their number.
        """

        def action() -> int:
            aborted = self.core.abort(which)
            for sequence in aborted:
                sequence.deliver(sequence)
            return len(aborted)

        return self.call(action)

    def pause(self, mode: Literal["keep", "wait", "abort"]) -> "concurrent.futures.Future[None]":
        """Stop decoding, with ``wait`` after all requests submitted so far; the future is done when it has stopped.

        New requests are held until ``resume``.
        """
        if mode == "wait":
            done: concurrent.futures.Future[None] = concurrent.futures.Future()

            def drain() -> None:
                if done.set_running_or_notify_cancel():
                    self.core.holding = True
                    self._drained.append(done)

            self._enqueue(drain)
            return done

        def action() -> None:
            if mode == "abort":
                for sequence in self.core.abort(None):
                    sequence.deliver(sequence)
            self.paused = True

        return self.call(action)

    def resume(self) -> "concurrent.futures.Future[None]":
        """Recompute caches of older weights, then continue decoding. Also ends a pause that is still waiting."""

        def action() -> None:
            self._end_drain()
            if self._weights_changed:
                self.core.preempt()
                self._weights_changed = False
            self.paused = False
            self.core.release()

        return self.call(action)

    def load_weights(self, pieces: Items[Piece]) -> None:
        """Copy pieces into the weights of the same names, quantising those held in 8 bits; block until that is done.

        Raises WeightSyncError for an unknown name, a wrong shape, or weights whose memory is freed.
        """

        def action() -> None:
            with torch.no_grad():
                if self._shapes:
                    raise WeightSyncError("the engine sleeps without its weights; wake it up for weights first")
                self.core.weights_changed()
                weights = dict(single(self.core.model.named_parameters()))
                for piece in pieces:
                    name = piece.name
                    if name not in weights:
                        raise WeightSyncError(f"the engine's model has no weights {name!r}")
                    if weights[name].shape != piece.shape:
                        raise WeightSyncError(
                            f"{name} has shape {list(piece.shape)}, the engine's has {list(weights[name].shape)}"
                        )
                    if name in self._requantizer:
                        self._requantizer.store(piece, weights[name])
                    else:
                        piece.copy_into(weights[name])
                    # Pieces come in order, so this is the last one.
                    if piece.start + piece.data.numel() == piece.total:
                        self._unsent.discard(name)
            self._weights_changed = True

        self.call(action).result()

    def load_adapters(self, pairs: Pairs, scale: float) -> None:
        """Compute with these adapters beside the weights, in place of earlier ones; block until that is done.

        Raises WeightSyncError for a layer that the model does not have, or a wrong shape.
        """

        def action() -> None:
            self._adapters.load(pairs, scale)
            self.core.weights_changed(in_place=False)
            self._weights_changed = True

        self.call(action).result()

    def checksums(self) -> "concurrent.futures.Future[dict[str, str]]":
        """Compute the checksums of the weights in use, with those of adapters."""
        return self.call(lambda: checksums(self.core.model, self._adapters.named()))

    def set_version(self, version: str) -> "concurrent.futures.Future[None]":
        """Set the version that later tokens carry.

        The future fails with WeightSyncError if some weights, dropped by a sleep, have not been sent again.
        """

        def action() -> None:
            if self._unsent:
                raise WeightSyncError(
                    f"{len(self._unsent)} weights have not been sent since the engine slept: "
                    f"{', '.join(sorted(self._unsent)[:3])}, ..."
                )
            self.core.version = version

        return self.call(action)

    def sleep(self, level: int) -> "concurrent.futures.Future[None]":
        """Free the cache and, at level 2, the weights. Requests are kept, and recomputed after ``wake``."""

        def action() -> None:
            self._cache_asleep = True
            self.core.free_cache()
            if level >= 2 and not self._shapes:
                self._shapes = {name: p.shape for name, p in self.core.model.named_parameters()}
                for parameter in self.core.model.parameters():
                    parameter.data = parameter.data.new_empty(0)
            give_back(self.core.device)

        return self.call(action)

    def wake(self, tags: Items[str]) -> "concurrent.futures.Future[None]":
        """Allocate memory again for ``weights``, ``kv_cache`` or, without tags, both.

        Decoding continues only after freed weights have been sent again.
        """

        def action() -> None:
            if (not tags or "weights" in tags) and self._shapes:
                for name, parameter in self.core.model.named_parameters():
                    parameter.data = parameter.data.new_empty(self._shapes[name])
                self._unsent = {name for name, _ in single(self.core.model.named_parameters())}
                self._shapes = {}
            if not tags or "kv_cache" in tags:
                self._cache_asleep = False

        return self.call(action)

    def _main(self) -> None:
        try:
            self._run()
        # An engine that cannot decode must not appear alive.
        except Exception as error:
            log.exception("the engine's thread failed")
            with self._condition:
                self._stopping = True
            self._on_crash(error)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._commands and not self._stopping and not self._may_step():
                    self._condition.wait()
                if self._stopping:
                    return
                commands, self._commands = self._commands, deque()
            if commands:
                for sequence in self.core.settle():
                    sequence.deliver(sequence)
            for command in commands:
                command()
            if self._may_step():
                for sequence in self.core.step():
                    sequence.deliver(sequence)
            if self._drained and not (self.core.running or self.core.waiting):
                self.paused = True
                self._end_drain()

    def _end_drain(self) -> None:
        """Complete the pauses that wait for running sequences to finish."""
        for future in self._drained:
            future.set_result(None)
        self._drained = []

    def _may_step(self) -> bool:
        if self.paused or self.asleep or self._unsent:
            return False
        return bool(self.core.running or self.core.waiting)


def checksums(model: nn.Module, adapters: Mapping[str, Tensor] = NO_ADAPTERS) -> dict[str, str]:
    """Return the xxh3_128 hash of each of a model's weights, by the name used in updates, of scales and of adapters."""
    scales = ((f"{name}.scales", tensor) for name, tensor in named_scales(model))
    return {
        name: xxhash.xxh3_128_hexdigest(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, p in itertools.chain(single(model.named_parameters()), scales, adapters.items())
    }


class LocalEngine:
    """Samples from the current weights of ``model``; close it before the model is trained further.

    Without ``pictures`` it refuses prompts with images.
    """

    def __init__(
        self, model: nn.Module, *, max_batch: int, max_length: int, pictures: PictureProcessor | None = None
    ) -> None:
        # The weights may change between two requests without notice, so prefixes cannot be reused.
        core = EngineCore(model, max_batch=max_batch, max_length=max_length, reuse_prefixes=False, pictures=pictures)
        self._engine = EngineThread(core, self._crashed)
        self._waiting: set[asyncio.Future[Sequence]] = set()
        self._numbers = itertools.count()

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        """Implement ``api.StreamingGenerator``; every token carries version 0.0."""
        if (refusal := self._engine.core.refusal(request.token_ids, request.max_tokens)) is not None:
            raise EngineRejected(refusal)
        if request.json_schema:
            raise SchemaRejected("without a server the engine follows no JSON schema")
        try:
            placed = await asyncio.to_thread(
                place_images, self._engine.core.pictures, request.token_ids, request.images
            )
        except DataError as error:
            raise EngineRejected(str(error)) from error
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence] = loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

        def deliver(done: Sequence) -> None:
            loop.call_soon_threadsafe(_resolve, future, done)

        def progress(part: Sequence) -> None:
            assert heard is not None
            loop.call_soon_threadsafe(heard, part.sampled)

        sequence = Sequence(
            request_id=f"{request.request_id}-{next(self._numbers)}",
            tokens=list(request.token_ids),
            images=placed,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            stop_token_ids=frozenset(request.stop_token_ids),
            seed=request.seed,
            alternatives=request.alternatives,
            deliver=deliver,
            progress=progress if heard is not None else None,
        )
        self._engine.submit(sequence)
        try:
            done = await future
        except asyncio.CancelledError:
            self._engine.abort(sequence)
            raise
        assert done.finish_reason is not None
        return GenerateResult(
            token_ids=done.sampled,
            logprobs=done.logprobs,
            versions=[VersionRun(Version(), 0, len(done.logprobs))],
            finish_reason=done.finish_reason,
            alternatives=done.likeliest,
        )

    def close(self) -> None:
        """Stop the engine's thread, dropping requests in flight."""
        self._engine.stop()

    def _crashed(self, error: Exception) -> None:
        for future in list(self._waiting):
            lost = EngineLost(f"the engine failed: {error}")
            future.get_loop().call_soon_threadsafe(_fail, future, lost)


def _resolve(future: "asyncio.Future[Sequence]", done: Sequence) -> None:
    if not future.done():
        future.set_result(done)


def _fail(future: "asyncio.Future[Sequence]", error: EngineLost) -> None:
    if not future.done():
        future.set_exception(error)
