"""The Megatron-Core backend: forward and backward passes through the pipeline, checkpoints, weights for engines.

The rows of a micro-batch are packed into one sequence, and ranks that share rows hold a part of it each. All processes
of one data-parallel rank get the same micro-batches; the last pipeline stage differentiates the loss, and the others
evaluate it on the last stage's outputs, so that the sums which a loss keeps are equal on all of them. ``Pass`` has
the callbacks of Megatron-Core's schedules; its routers replay recorded experts as in ``trainer/model.py``.

``megatron_on_cpu`` lets Megatron-Core 0.16 run on gloo and the CPU, so that ``trainer.backend=megatron`` can be tried
on a laptop, although Megatron-Core hard-codes CUDA devices. Inside it

- ``torch.cuda.current_device`` returns ``cpu``; ``set_device``, ``synchronize`` and ``empty_cache`` do nothing;
- there is one stream, and its work is always complete;
- token counts of experts, which Megatron moves to the host as NumPy arrays, are converted to these directly;
- the random state of "the GPU" is that of the CPU;
- a factory's ``device="cuda"``, ``Tensor.cuda()`` and ``Tensor.to("cuda")`` stay on the CPU;
- ``Tensor.type()`` returns ``torch.cuda.FloatTensor``, which Megatron's optimizer compares as text.

Everything is restored on exit. Other threads see the first four too, but on a machine without CUDA none of them calls
these; the others apply to this thread only. The layers, sharding, schedules and collectives that run this way are
Megatron's own; streams, kernels and NCCL are not exercised.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged, UserError
from rl_async.pictures import PictureProcessor
from rl_async.trainer.attention import gathered, shared_places
from rl_async.trainer.backend import LossFn, OutputName, Outputs, Published
from rl_async.trainer.batch_layout import row_cost_of
from rl_async.trainer.checkpoints import write_shards
from rl_async.trainer.export import SHARDS, require_whole, write_described
from rl_async.trainer.families import text_of
from rl_async.trainer.megatron.mapping import Shape, config_key
from rl_async.trainer.megatron.model import (
    Axis,
    Parallel,
    build_chunks,
    join_groups,
    require_divisible,
    shape_of,
    shares_tokens,
    transformer_config,
    vocab_parallel_outputs,
)
from rl_async.trainer.megatron.weights import (
    DistributedAdamW,
    ShardedModel,
    host_copy,
    layout_of,
    local_shards,
    open_model,
    read_weights,
    restore,
    weights_folder,
    wrap,
)
from rl_async.trainer.model import Head, check_records, is_replayed
from rl_async.trainer.packing import Tensors, empty_tensors
from rl_async.weight_sync.layout import Layout
from rl_async.weight_sync.reshard import ShardedWeights

# The scores and the numbers of the experts that tokens go through, [N, k] each.
Choice = tuple[Tensor, Tensor]


class ReplayedRouter:
    """Stands in for Megatron-Core's ``RouterReplay``, which cannot leave tokens without a record to the router.

    Attributes:
        layer: Number of its layer in the whole model, from 0.
        record: The experts to replay, or None to route freely.
        same: Which tokens the router would have sent to the same experts in the last pass that replayed.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.record: Tensor | None = None  # int16 [N, k]
        self.same: Tensor | None = None  # bool [N]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., Choice],
    ) -> Choice:
        """Return the scores of the experts of the record; of the router's own for tokens without one."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.record is None:
            return values, own
        chosen = torch.where(self.record < 0, own, self.record.long())
        self.same = (chosen.sort(-1).values == own.sort(-1).values).all(-1)
        return scores.gather(1, chosen), chosen


def replays_routers(shape: Shape, parallel: Parallel, config: TrainerConfig) -> bool:
    """Return whether a policy's routers replay records. Raises UserError if they must and cannot."""
    reason = None
    if shares_tokens(shape, parallel):
        reason = f"ranks of trainer.tensor_parallel={parallel.tensor.size} see a part of the tokens each"
    return is_replayed(config, shape.experts, reason)


def replayed_routers(chunk: Any) -> list[ReplayedRouter]:
    """Let the routers of a part of the model replay records; return the objects that hold these."""
    found = []
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = ReplayedRouter(module.layer_number - 1)
            found.append(module.router_replay)
    return found


def hand_out(routers: Sequence[ReplayedRouter], experts: Tensor | None) -> None:
    """Have the next pass replay a record, int16 [N, layers, k], or with None route by itself."""
    for router in routers:
        router.record = None if experts is None else experts[:, router.layer]
        router.same = None


def agreement(routers: Sequence[ReplayedRouter]) -> Tensor | None:
    """Return the share of layers that agreed with the record in the last pass, float32 [N]; None without a record."""
    same = [router.same for router in routers if router.same is not None]
    return torch.stack(same).float().mean(0) if same else None


class PackedRows(NamedTuple):
    """A packed micro-batch: which tokens each of the S ranks that share its rows holds, [S, N].

    Rows are padded at their ends so that ranks hold equal parts, and behind the last one so that these divide further.

    Attributes:
        rows: Number of each token's row in the batch.
        places: Position of each token in its row.
        there: Whether it is a token. Padding has the row and position of some token.
        lengths: Lengths of the rows with their padding, on the host; the padding behind the last row is one more.
    """

    rows: Tensor  # int64 [S, N]
    places: Tensor  # int64 [S, N]
    there: Tensor  # bool [S, N]
    lengths: Tensor  # int64 [B] or [B + 1]


# Computes a micro-batch's outputs from the tensor that the last stage returns.
OutputsOf = Callable[[Tensor, Tensors, PackedRows], Outputs]
# Returns the routers of a part of the model.
RoutersOf = Callable[[Any], Sequence[ReplayedRouter]]


class Pass:
    """The callbacks of one pass, and their results: ``outputs`` and ``losses`` by micro-batch.

    Micro-batches beyond ``count`` only fill the pipeline. A rank's tokens are padded to a ``multiple``. ``gives`` names
    the fields of the outputs, ``given`` those of a model and a request.
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        count: int,
        gives: Sequence[str],
        outputs_of: OutputsOf,
        routers_of: RoutersOf,
        context: Axis,
        multiple: int,
    ) -> None:
        self._loss_fn, self._count, self._gives, self._outputs_of = loss_fn, count, gives, outputs_of
        self._routers_of, self._context, self._multiple = routers_of, context, multiple
        self.outputs: list[Outputs] = []
        # They stay on the device, since reading one waits until it is computed.
        self.losses = list[Tensor]()

    def forward(self, batches: Iterator[tuple[int, Tensors]], chunk: Any) -> tuple[Tensor, Any]:
        """Pass the next micro-batch through a part of the model; return its output and the loss function for it."""
        number, batch = next(batches)
        packed = pack_rows(batch, self._context.size, self._multiple)
        rows, places = packed.rows[self._context.rank], packed.places[self._context.rank]
        record = None if batch.experts is None else batch.experts[rows.cpu(), places.cpu()].to(rows.device)
        hand_out(self._routers_of(chunk), record)
        tokens = batch.tokens[rows, places]
        out = chunk(tokens[None], places[None], None, packed_seq_params=_packing(packed.lengths, tokens.device))
        return out, functools.partial(self._loss, number, batch, packed)

    def _loss(
        self, number: int, batch: Tensors, packed: PackedRows, out: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return self._take(number, self._outputs_of(out, batch, packed)), torch.zeros((), dtype=torch.int), {}

    def _take(self, number: int, outputs: Outputs) -> Tensor:
        """Keep a micro-batch's outputs and return its loss; 0 for one that only fills the pipeline."""
        self.outputs.append(_detached(outputs))
        if self._loss_fn is None or number >= self._count:
            any_part: Tensor = getattr(outputs, self._gives[0])
            return any_part.sum() * 0.0
        loss = self._loss_fn(number, outputs)
        self.losses.append(loss.detach())
        return loss

    def share(self, batches: Sequence[Tensors], parallel: Parallel) -> None:
        """Broadcast the last stage's outputs to the other stages, which evaluate the loss on them."""
        pipeline = parallel.pipeline
        source = dist.get_global_rank(pipeline.group, pipeline.size - 1)
        for number, batch in enumerate(batches):
            if parallel.is_last_stage:
                found = self.outputs[number]
            else:
                device = batch.tokens.device
                found = Outputs(**{name: torch.empty(batch.mask.shape, device=device) for name in self._gives})
            for name in self._gives:
                dist.broadcast(getattr(found, name), source, group=pipeline.group)
            if not parallel.is_last_stage:
                with torch.no_grad():
                    self._take(number, found)


def given(shape: Shape, requested: frozenset[OutputName]) -> list[str]:
    """Return the outputs that a model of this shape gives on this request."""
    policy = ["logprobs", *sorted(requested - {"values"})] if shape.has_logits else []
    return [*policy, "values"] if "values" in requested or not shape.has_logits else policy


def pack_rows(batch: Tensors, ranks: int, multiple: int) -> PackedRows:
    """Pack a micro-batch for so many ``ranks`` that share its rows, each with a ``multiple`` of tokens."""
    device, count = batch.tokens.device, len(batch.lengths)
    unit = 1 if ranks == 1 else 2 * ranks
    lengths = (batch.lengths + unit - 1) // unit * unit
    if missing := -int(lengths.sum()) % math.lcm(unit, ranks * multiple):
        lengths = torch.cat([lengths, lengths.new_tensor([missing])])
    rows, places = shared_places(_bounds(lengths, device), ranks)
    known = torch.cat([batch.lengths, batch.lengths.new_zeros(1)]).to(device)
    there = places < known[rows]
    return PackedRows(rows.clamp(max=count - 1), places.clamp(max=batch.tokens.shape[1] - 1), there, lengths)


def _bounds(lengths: Tensor, device: torch.device) -> Tensor:
    """Return the bounds of packed rows of these lengths [B], int64 [B + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)


def _packing(lengths: Tensor, device: torch.device) -> PackedSeqParams:
    bounds, longest = _bounds(lengths, device).int(), int(lengths.max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _detached(outputs: Outputs) -> Outputs:
    def kept(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.detach().contiguous()

    return Outputs(
        logprobs=kept(outputs.logprobs),
        entropy=kept(outputs.entropy),
        sum_squares=kept(outputs.sum_squares),
        values=kept(outputs.values),
        agreement=outputs.agreement,
    )


class MegatronBackend:
    """Implements ``backend.Backend`` with Megatron-Core. It offers no distributions.

    It computes in ``dtype``. Gradients are summed in float32, and with dtype bfloat16 the optimizer keeps float32
    masters; the model's weights are these, rounded. ``config`` says how the ranks share the model; unless
    ``trains``, the model is frozen: a reference. ``path`` is a Hugging Face folder, or a checkpoint's of a model.
    """

    def __init__(
        self, path: str, dtype: str, device: str, config: TrainerConfig, head: Head = "policy", trains: bool = True
    ) -> None:
        self.device, self.path, self._complete = device, path, config.checkpoint_hf
        self.dtype = getattr(torch, dtype)
        self.hf_config = _hf_config(path, config_key(head))
        self.row_cost = row_cost_of(text_of(self.hf_config))
        # Its families read no images.
        self.pictures: PictureProcessor | None = None
        with self._megatron():
            parallel = join_groups(config)
            self.data_parallel = parallel.data_parallel
            shape = shape_of(self.hf_config, path, head)
            require_divisible(shape, parallel)
            transformer = transformer_config(self.hf_config, shape, parallel, self.dtype, on_cpu=device == "cpu")
            chunks = [c.to(device, self.dtype) for c in build_chunks(self.hf_config, shape, transformer, parallel)]
            self._model = ShardedModel(chunks, shape, parallel)
            self._chunks = chunks
            self.replays_routers = trains and head != "value" and replays_routers(shape, parallel, config)
            self._routers = [replayed_routers(chunk) if self.replays_routers else [] for chunk in chunks]
            self._optimizer: DistributedAdamW | None = None
            if trains:
                transformer.finalize_model_grads_func = _finish_gradients
                self._chunks = wrap(chunks, transformer)
                self._optimizer = DistributedAdamW(self._chunks, config, self.dtype)
            read_weights(self._model, self._optimizer, open_model(Path(path), shape))

    def _megatron(self) -> AbstractContextManager[None]:
        """Return the context that Megatron's code runs in."""
        return megatron_on_cpu() if self.device == "cpu" else nullcontext()

    @property
    def _parallel(self) -> Parallel:
        return self._model.parallel

    def forward(self, batch: Tensors, requested: frozenset[OutputName] = frozenset()) -> Outputs:
        with torch.no_grad():
            return self._run([batch], None, requested)[0][0]

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[OutputName] = frozenset()
    ) -> tuple[float, float]:
        assert self._optimizer is not None
        _, total = self._run(batches, loss_fn, requested)
        with self._megatron():
            norm = self._optimizer.norm()
        finite = torch.tensor([float(math.isfinite(total) and math.isfinite(norm))])
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        with self._megatron():
            if finite.item():
                self._optimizer.step()
            self._optimizer.clear()
        if not finite.item():
            raise TrainingDiverged(f"loss {total} and gradient norm {norm} must be finite")
        return total, norm

    def _run(
        self, batches: Sequence[Tensors], loss_fn: LossFn | None, requested: frozenset[OutputName]
    ) -> tuple[list[Outputs], float]:
        """Pass the micro-batches through the pipeline, and back if there is a loss.

        Returns the detached outputs and the summed loss, on all stages.
        """
        pipeline = self._parallel.pipeline
        missing = -len(batches) % pipeline.size if self._parallel.virtual_stages > 1 else 0
        passed = [*batches, *(empty_tensors(self.device) for _ in range(missing))]
        chunks = self._chunks
        routers = dict(zip(map(id, chunks), self._routers, strict=True))
        for batch in batches:
            if self.replays_routers and batch.experts is not None:
                check_records(batch.experts, self.hf_config)
        shape = self._model.shape
        ran = Pass(
            loss_fn=loss_fn,
            count=len(batches),
            gives=given(shape, requested),
            outputs_of=functools.partial(self._outputs, requested=requested),
            routers_of=lambda chunk: routers[id(chunk)],
            context=self._parallel.context,
            multiple=self._parallel.tensor.size if shares_tokens(shape, self._parallel) else 1,
        )
        with self._megatron():
            get_forward_backward_func()(
                forward_step_func=ran.forward,
                data_iterator=[iter(enumerate(passed)) for _ in chunks],
                model=chunks,
                num_microbatches=len(passed),
                # These two describe the first message between stages alone; every message carries its own shape.
                seq_length=1,
                micro_batch_size=1,
                forward_only=loss_fn is None,
            )
        if pipeline.size > 1:
            ran.share(passed, self._parallel)
        return ran.outputs[: len(batches)], sum(torch.stack(ran.losses).tolist()) if ran.losses else 0.0

    def _outputs(self, out: Tensor, batch: Tensors, packed: PackedRows, *, requested: frozenset[OutputName]) -> Outputs:
        """Compute outputs [B, T-1], 0 beyond rows' ends, from this rank's columns of its tokens' logits, [1, N, V /
        ranks], and the values of the same pass."""
        shape, context, outputs = self._model.shape, self._parallel.context, Outputs()
        if shape.has_logits:
            rows, places = packed.rows[context.rank], packed.places[context.rank]
            following = batch.tokens.roll(-1, 1)[rows, places]
            logits, wanted = out[0].float() / batch.temperature[rows, 0], requested - {"values"}
            outputs = vocab_parallel_outputs(logits, following, wanted, self._parallel.tensor, shape.vocab)
        values = self._model.chunks[-1].output_layer.value_head.take() if shape.has_values else None
        # With several stages it would be the agreement of this stage's layers alone.
        agreed = agreement(self._routers[0]) if self._parallel.pipeline.size == 1 else None
        inside = packed.there & (packed.places < batch.lengths.to(self.device)[packed.rows] - 1)
        index = packed.rows[inside], packed.places[inside]

        def padded(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            whole = gathered(part, context.group) if context.size > 1 else part
            return whole.new_zeros(batch.mask.shape).index_put(index, whole[inside.flatten()])

        return Outputs(
            logprobs=padded(outputs.logprobs),
            entropy=padded(outputs.entropy),
            sum_squares=padded(outputs.sum_squares),
            values=padded(values if "values" in given(shape, requested) else None),
            agreement=padded(agreed),
        )

    def sharded_weights(self, what: Published = "merged") -> ShardedWeights:
        # This backend trains no adapters, and engines get no critic.
        assert what == "merged" and self._model.shape.has_logits
        return local_shards(self._model, self._layout)

    @functools.cached_property
    def _layout(self) -> Layout:
        return layout_of(self._model, Path(self.path), self.dtype)

    def stage(self, folder: Path, group: dist.ProcessGroup | None) -> Callable[[], None]:
        assert self._optimizer is not None
        parts = list(host_copy(self._model, self._optimizer))

        def write() -> None:
            write_shards(parts, folder / SHARDS, group)
            if dist.get_rank() == 0:
                tokenizer = self.path if self._model.shape.has_logits else None
                write_described(folder, self.hf_config, tokenizer, self._complete)

        return write

    def save(self, folder: Path) -> None:
        self.stage(folder, None)()
        dist.barrier()

    def load(self, folder: Path) -> None:
        assert self._optimizer is not None
        require_whole(folder)
        restore(self._model, self._optimizer, folder)

    def sleep(self) -> None:
        """Release what only a step needs: gradients, moments and masters. Weights stay, for engines to read."""
        if self._optimizer is not None:
            self._optimizer.release_gradients()
            self._optimizer.move("cpu")

    def wake(self) -> None:
        if self._optimizer is not None:
            self._optimizer.move(self.device)
            self._optimizer.allocate_gradients()


def _finish_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **more: Any) -> None:
    """Finish gradients as Megatron does, without dividing by a token count: losses are divided already."""
    finalize_model_grads(chunks, None, **more)


def _hf_config(path: str, key: str) -> Any:
    try:
        return AutoConfig.from_pretrained(weights_folder(Path(path)), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: cannot read a model's config from {path}: {error}") from error


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return func(args[0]).replace("torch.", "torch.cuda.")
        if _is_cuda(named.get("device")):
            named["device"] = "cpu"
        if func is torch.Tensor.to:
            args = ["cpu" if _is_cuda(value) else value for value in args]
        return func(*args, **named)


class _Stream:
    """The stream of a device without streams, where all work is complete."""

    def wait_stream(self, other: "_Stream") -> None:
        """Do nothing: all work is complete."""

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        """Do nothing: all work is complete."""


_STREAM = _Stream()


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


def _on_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Within this context, run Megatron-Core's CUDA calls on the CPU."""
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    # Each name gets a function of its own, since Dynamo refuses to find one object under two names.
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        *((torch.cuda, name, lambda *_, **__: None) for name in ("set_device", "synchronize", "empty_cache")),
        *((torch.cuda, name, lambda *_, **__: _STREAM) for name in ("Stream", "current_stream")),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]
    with ExitStack() as undo:
        for owner, name, substitute in replaced:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, substitute)
        undo.enter_context(_CudaMeansCpu())
        yield
