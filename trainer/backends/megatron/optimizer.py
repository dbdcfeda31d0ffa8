"""Megatron-Core's distributed AdamW: each data-parallel rank keeps the moments of its own part of a parameter."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backends.schedule import learning_rate_factor

MOMENTS = ("exp_avg", "exp_avg_sq")


def wrap(chunks: list[Any], config: TransformerConfig) -> list[Any]:
    """Wrap the model's parts with float32 buffers in which gradients are summed over data-parallel ranks."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]


class Own(NamedTuple):
    """What a rank keeps of its shard of a parameter: the range of its numbers, flattened, from ``start`` on.

    ``master`` [numbers] is that range in float32, of a float32 parameter a view; ``moments`` has the tensors of AdamW,
    and nothing before its first step.
    """

    start: int
    master: Tensor
    moments: Mapping[str, Tensor]


class DistributedAdamW:
    """AdamW with clipping and a schedule; weight decay applies to all parameters, as in ``torch.optim.AdamW``.

    ``dtype`` is the model's. Each data-parallel rank keeps float32 masters of its part of bfloat16 parameters.
    """

    def __init__(self, chunks: list[Any], config: TrainerConfig, dtype: torch.dtype) -> None:
        self._chunks, self._config = chunks, config
        self._factor = learning_rate_factor(config)
        self.steps = 0
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                clip_grad=config.grad_clip,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            chunks,
            config_overrides={},  # by default Megatron exempts norms and biases from weight decay
        )
        self.clear()

    def norm(self) -> float:
        """Return the global norm of the accumulated gradients. A collective."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self) -> None:
        """Apply the accumulated gradients at the scheduled learning rate, on all ranks. A collective."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * self._factor(self.steps)
        self._optimizer.step()
        self.steps += 1

    def clear(self) -> None:
        """Set all accumulated gradients to zero."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def own(self, parameter: torch.nn.Parameter) -> Own | None:
        """Return what this rank keeps of a parameter; None if other data-parallel ranks keep all of it."""
        owner = self._owner(parameter)
        if parameter not in owner.model_param_gbuf_map:
            return None
        start = owner._get_model_param_range_map(parameter)["param"].start
        master = self._main(owner, parameter)
        return Own(start, master.detach(), owner.optimizer.state.get(master, {}))

    def set_moments(self, parameter: torch.nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Continue after ``steps`` steps with these moments [numbers] of a parameter of which this rank keeps some."""
        owner = self._owner(parameter)
        state = {**moments, "step": torch.tensor(float(self.steps))}
        owner.optimizer.state[self._main(owner, parameter)] = state

    def move(self, device: str) -> None:
        """Move the moments of all parameters, and the masters that they have, to ``device``."""
        for owner in self._optimizer.chained_optimizers:
            for masters in owner.shard_fp32_from_float16_groups:
                for master in masters:
                    master.data = master.data.to(device)
            for state in owner.optimizer.state.values():
                for key in MOMENTS:
                    state[key] = state[key].to(device)

    def release_gradients(self) -> None:
        """Free the memory in which gradients are summed, until ``allocate_gradients``; they must have been cleared."""
        for sums in self._gradients():
            sums.untyped_storage().resize_(0)

    def allocate_gradients(self) -> None:
        """Undo ``release_gradients``: gradients are zero."""
        for sums in self._gradients():
            sums.untyped_storage().resize_(sums.nbytes)
            sums.zero_()

    def _gradients(self) -> Iterator[Tensor]:
        """Yield the tensors of which all gradients are views."""
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers)

    def _owner(self, parameter: torch.nn.Parameter) -> Any:
        """Return the optimizer of a parameter: experts have their own, since fewer ranks hold copies of them."""
        experts = not getattr(parameter, "allreduce", True)
        return self._optimizer.chained_optimizers[-1 if experts else 0]

    def _main(self, owner: Any, parameter: torch.nn.Parameter) -> Tensor:
        group, place = owner.model_param_group_index_map[parameter]
        return owner.optimizer.param_groups[group]["params"][place]
