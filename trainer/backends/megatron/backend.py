"""The Megatron-Core backend: forward and backward passes through the pipeline, checkpoints, weights for engines.

The rows of a micro-batch are packed into one sequence. All processes of one data-parallel rank get the same
micro-batches; the last pipeline stage differentiates the loss, and the others evaluate it on the last stage's outputs,
so that the sums which a loss keeps are equal on all of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import AutoConfig

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged, UserError
from rl_async.trainer.backends.interface import LossFn, OutputName, Outputs, Published
from rl_async.trainer.backends.megatron.checkpoint import host_copy, read_weights, restore
from rl_async.trainer.backends.megatron.cpu import megatron_on_cpu
from rl_async.trainer.backends.megatron.mapping import config_key
from rl_async.trainer.backends.megatron.model import (
    build_chunks,
    require_divisible,
    shape_of,
    shares_tokens,
    transformer_config,
)
from rl_async.trainer.backends.megatron.optimizer import DistributedAdamW, wrap
from rl_async.trainer.backends.megatron.outputs import vocab_parallel_outputs
from rl_async.trainer.backends.megatron.parallel import Parallel, join_groups
from rl_async.trainer.backends.megatron.passes import PackedRows, Pass, given
from rl_async.trainer.backends.megatron.routing import agreement, replayed_routers, replays_routers
from rl_async.trainer.backends.megatron.weights import (
    ShardedModel,
    layout_of,
    local_shards,
    open_model,
    weights_folder,
)
from rl_async.trainer.batches.cost import row_cost_of
from rl_async.trainer.batches.tensors import Tensors, empty_tensors
from rl_async.trainer.checkpoints.adapters import require_whole
from rl_async.trainer.checkpoints.export import SHARDS, write_described
from rl_async.trainer.checkpoints.shards import write_shards
from rl_async.trainer.model.heads import Head
from rl_async.trainer.model.routing import check_records
from rl_async.trainer.model.ulysses import gathered
from rl_async.weight_sync.layout import Layout
from rl_async.weight_sync.reshard.gather import ShardedWeights


class MegatronBackend:
    """Implements ``interface.Backend`` with Megatron-Core. It offers no distributions.

    It computes in ``dtype``. Gradients are summed in float32, and with dtype bfloat16 the optimizer keeps float32
    masters, of which the model's weights are the rounded values. ``config`` says how the ranks share the model; unless
    ``trains``, the model is frozen: a reference. ``path`` is a Hugging Face folder, or a checkpoint's of a model.
    """

    def __init__(
        self,
        path: str,
        dtype: str,
        device: str,
        config: TrainerConfig,
        head: Head = "policy",
        trains: bool = True,
    ) -> None:
        self.device, self.path, self._complete = device, path, config.checkpoint_hf
        self.dtype = getattr(torch, dtype)
        self.hf_config = _hf_config(path, config_key(head))
        self.row_cost = row_cost_of(self.hf_config)
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
                seq_length=1,  # of the first message between stages; each message carries its own shape
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
        agreed = agreement(self._routers[0]) if self._parallel.pipeline.size == 1 else None  # else of this stage alone
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
        assert what == "merged" and self._model.shape.has_logits  # it trains no adapters, and engines get no critic
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
