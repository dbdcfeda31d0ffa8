"""The Megatron-Core backend: forward and backward passes through the pipeline, checkpoints, weights for engines.

The rows of a micro-batch are packed into one sequence. All processes of one data-parallel rank get the same
micro-batches; the last pipeline stage differentiates the loss, and the others evaluate it on the last stage's outputs,
so that the sums which a loss keeps are equal on all of them.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged, UserError
from rl_async.trainer.backends.interface import LossFn, OutputName, Outputs, Published
from rl_async.trainer.backends.megatron.attention import row_places
from rl_async.trainer.backends.megatron.cpu import megatron_on_cpu
from rl_async.trainer.backends.megatron.model import build_chunks, require_divisible, shape_of, transformer_config
from rl_async.trainer.backends.megatron.optimizer import MOMENTS, DistributedAdamW, wrap
from rl_async.trainer.backends.megatron.outputs import vocab_parallel_outputs
from rl_async.trainer.backends.megatron.parallel import Parallel, join_groups
from rl_async.trainer.backends.megatron.weights import ShardedModel, fill, layout_of, local_shards, open_weights, stream
from rl_async.trainer.batches.cost import row_cost_of
from rl_async.trainer.batches.tensors import Tensors, empty_tensors
from rl_async.trainer.checkpoints.export import MOMENT, WEIGHTS, WHOLE
from rl_async.trainer.model.heads import MODEL_FOLDER
from rl_async.weight_sync.layout import Layout
from rl_async.weight_sync.reshard.gather import ShardedWeights

OPTIMIZER_FILE = "optimizer.safetensors"  # in FSDP2's naming, so that FSDP2 can read it too


class MegatronBackend:
    """Implements ``interface.Backend`` with Megatron-Core. It offers neither values nor distributions.

    It computes in float32 and publishes in ``dtype``. ``config`` says how the ranks share the model; unless ``trains``,
    the model is frozen: a reference.
    """

    def __init__(self, path: str, dtype: str, device: str, config: TrainerConfig, *, trains: bool = True) -> None:
        self.device, self.path = device, path
        self.dtype = getattr(torch, dtype)
        self.hf_config = _hf_config(path)
        self.row_cost = row_cost_of(self.hf_config)
        with self._megatron():
            parallel = join_groups(config)
            self.data_parallel = parallel.data_parallel
            shape = shape_of(self.hf_config, path)
            require_divisible(shape, parallel)
            transformer = transformer_config(self.hf_config, shape, parallel, on_cpu=device == "cpu")
            chunks = [c.to(device) for c in build_chunks(self.hf_config, shape, transformer, parallel)]
            self._model = ShardedModel(chunks, shape, parallel)
            fill(self._model, open_weights(Path(path)), _copy)
            self._chunks = chunks
            self._optimizer: DistributedAdamW | None = None
            if trains:
                transformer.finalize_model_grads_func = _finish_gradients
                self._chunks = wrap(chunks, transformer)
                self._optimizer = DistributedAdamW(self._chunks, config, device)

    def _megatron(self) -> AbstractContextManager[None]:
        """Return the context in which Megatron's code runs."""
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
        ran = _Pass(loss_fn, len(batches), requested, functools.partial(self._outputs, requested=requested))
        chunks = self._chunks
        with self._megatron():
            get_forward_backward_func()(
                forward_step_func=ran.forward,
                data_iterator=[iter(enumerate(passed)) for _ in chunks],
                model=chunks,
                num_microbatches=len(passed),
                seq_length=1,  # of the first message between stages; each message carries its own shape
                micro_batch_size=1,
                forward_only=loss_fn is None,
            )
        if pipeline.size > 1:
            self._share(ran, passed)
        return ran.outputs[: len(batches)], sum(torch.stack(ran.losses).tolist()) if ran.losses else 0.0

    def _outputs(self, logits: Tensor, batch: Tensors, *, requested: frozenset[OutputName]) -> Outputs:
        """Compute outputs [B, T-1], 0 beyond rows' ends, from this rank's columns of logits, [1, N, V / ranks]."""
        rows, places = _packed_places(batch)
        following = batch.tokens.roll(-1, 1)[rows, places]
        logits = logits[0].float() / batch.temperature[rows, 0]
        packed = vocab_parallel_outputs(logits, following, requested, self._parallel.tensor, self._model.shape.vocab)
        inside = places < batch.lengths.to(self.device)[rows] - 1
        index = rows[inside], places[inside]

        def padded(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.new_zeros(batch.mask.shape).index_put(index, values[inside])

        return Outputs(padded(packed.logprobs), padded(packed.entropy), padded(packed.sum_squares))

    def _share(self, ran: "_Pass", batches: Sequence[Tensors]) -> None:
        """Broadcast the last stage's outputs to the other stages, which evaluate the loss on them."""
        pipeline = self._parallel.pipeline
        source = dist.get_global_rank(pipeline.group, pipeline.size - 1)
        for number, batch in enumerate(batches):
            if self._parallel.is_last_stage:
                found = ran.outputs[number]
            else:
                found = Outputs(*(torch.empty(batch.mask.shape, device=self.device) if w else None for w in ran.gives))
            for part in (found.logprobs, found.entropy, found.sum_squares):
                if part is not None:
                    dist.broadcast(part, source, group=pipeline.group)
            if not self._parallel.is_last_stage:
                with torch.no_grad():
                    ran.take(number, found)

    def sharded_weights(self, what: Published = "merged") -> ShardedWeights:
        assert what == "merged"  # it trains no adapters
        return local_shards(self._model, self._layout)

    @functools.cached_property
    def _layout(self) -> Layout:
        return layout_of(self._model, Path(self.path), self.dtype)

    def stage(self, folder: Path, group: dist.ProcessGroup | None) -> Callable[[], None]:
        """Gather whole tensors under Hugging Face names on rank 0.

        Any number of ranks can resume from them, and so can the FSDP2 backend.
        """
        assert self._optimizer is not None
        model = _on_rank0(stream(self._model, torch.Tensor.detach))
        optimizer = self._optimizer
        state: dict[str, Tensor] = {}
        for key in MOMENTS if optimizer.has_moments else ():
            moments = _on_rank0(stream(self._model, functools.partial(optimizer.moment, key=key)))
            state |= {_moment_name(name, key): moment for name, moment in moments.items()}
        if dist.get_rank() != 0:
            return lambda: None
        if optimizer.has_moments:
            state |= {_moment_name(name, "step"): torch.tensor(float(optimizer.steps)) for name in model}
        state["schedule|steps"] = torch.tensor(optimizer.steps)
        return functools.partial(self._write, folder, model, state)

    def _write(self, folder: Path, model: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        target = folder / MODEL_FOLDER
        target.mkdir(exist_ok=True)
        save_file(model, target / WHOLE, {"format": "pt"})
        self.hf_config.save_pretrained(target)
        AutoTokenizer.from_pretrained(self.path, trust_remote_code=False).save_pretrained(target)
        save_file(state, folder / OPTIMIZER_FILE)

    def save(self, folder: Path) -> None:
        self.stage(folder, None)()
        dist.barrier()

    def load(self, folder: Path) -> None:
        assert self._optimizer is not None
        if not (folder / OPTIMIZER_FILE).is_file():
            raise UserError(
                f"checkpoint {folder} was written with trainer.backend=fsdp2, whose shards this backend cannot read; "
                "resume with fsdp2, or start a new run from the model that `rl-async export` writes"
            )
        optimizer = self._optimizer
        fill(self._model, open_weights(folder / MODEL_FOLDER), _copy)
        state = load_file(folder / OPTIMIZER_FILE)
        optimizer.steps = int(state.pop("schedule|steps"))
        if not state:
            return
        steps = torch.tensor(float(optimizer.steps))
        for key in MOMENTS:
            fetch = functools.partial(_moment_of, state, key)
            fill(self._model, fetch, functools.partial(optimizer.set_moment, key=key, steps=steps))

    def sleep(self) -> None:
        self._move_optimizer("cpu")

    def wake(self) -> None:
        self._move_optimizer(self.device)

    def _move_optimizer(self, device: str) -> None:
        if self.device != "cpu" and self._optimizer is not None:
            self._optimizer.move(device)


class _Pass:
    """One pass of micro-batches through the pipeline: the callbacks of Megatron's schedules, and what they collect."""

    def __init__(self, loss_fn: LossFn | None, count: int, requested: frozenset[OutputName], outputs_of: Any) -> None:
        self._loss_fn, self._count, self._outputs_of = loss_fn, count, outputs_of
        self.gives = (True, "entropy" in requested, "sum_squares" in requested)
        self.outputs: list[Outputs] = []
        self.losses = list[Tensor]()  # on the device: reading one would wait for it

    def forward(self, batches: Iterator[tuple[int, Tensors]], chunk: Any) -> tuple[Tensor, Any]:
        """Pass the next micro-batch through a part of the model; return its output and the loss function for it."""
        number, batch = next(batches)
        rows, places = _packed_places(batch)
        packing = _packing(batch.lengths, batch.tokens.device)
        out = chunk(batch.tokens[rows, places][None], places[None], None, packed_seq_params=packing)
        return out, functools.partial(self._loss, number, batch)

    def _loss(self, number: int, batch: Tensors, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        outputs = self._outputs_of(logits, batch)
        return self.take(number, outputs), torch.zeros((), dtype=torch.int), {}

    def take(self, number: int, outputs: Outputs) -> Tensor:
        """Keep a micro-batch's outputs and return its loss; 0 for one that only fills the pipeline."""
        assert outputs.logprobs is not None
        self.outputs.append(_detached(outputs))
        if self._loss_fn is None or number >= self._count:
            return outputs.logprobs.sum() * 0.0
        loss = self._loss_fn(number, outputs)
        self.losses.append(loss.detach())
        return loss


def _packed_places(batch: Tensors) -> tuple[Tensor, Tensor]:
    return row_places(_bounds(batch.lengths, batch.tokens.device))


def _bounds(lengths: Tensor, device: torch.device) -> Tensor:
    """Return the bounds of packed rows of these lengths [B], int64 [B + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)


def _packing(lengths: Tensor, device: torch.device) -> PackedSeqParams:
    bounds, longest = _bounds(lengths, device).int(), int(lengths.max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _detached(outputs: Outputs) -> Outputs:
    parts = (outputs.logprobs, outputs.entropy, outputs.sum_squares)
    return Outputs(*(None if part is None else part.detach().contiguous() for part in parts))


def _finish_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **more: Any) -> None:
    """Finish gradients as Megatron does, without dividing by a token count: losses are divided already."""
    finalize_model_grads(chunks, None, **more)


def _moment_name(name: str, key: str) -> str:
    return f"{WEIGHTS}{name}{MOMENT}{key}"


def _moment_of(state: dict[str, Tensor], key: str, name: str) -> Tensor:
    return state[_moment_name(name, key)]


def _copy(parameter: torch.nn.Parameter, whole: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(whole)


def _on_rank0(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Consume a stream that is a collective; rank 0 keeps its tensors, on the host."""
    kept = {}
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            kept[name] = tensor.to("cpu", copy=True).contiguous()
    return kept


def _hf_config(path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: cannot read a model's config from {path}: {error}") from error
