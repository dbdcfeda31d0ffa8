"""Megatron-Core's distributed AdamW: each data-parallel rank keeps the moments of its own part of a parameter."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
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


class DistributedAdamW:
    """AdamW with clipping and a schedule; weight decay applies to all parameters, as in ``torch.optim.AdamW``.

    ``dtype`` is the model's. Each data-parallel rank keeps float32 masters of its part of bfloat16 parameters.
    """

    def __init__(self, chunks: list[Any], config: TrainerConfig, dtype: torch.dtype, device: str) -> None:
        self._chunks, self._config, self._device = chunks, config, device
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

    @property
    def has_moments(self) -> bool:
        """Whether the moments exist, that is after the first step; equal on all ranks."""
        return self.steps > 0

    def moment(self, parameter: torch.nn.Parameter, key: str) -> Tensor:
        """Return a moment of this rank's shard of a parameter, gathered from the data-parallel ranks. A collective."""
        return self._gathered(parameter, lambda owner, main: owner.optimizer.state[main][key])

    def master(self, parameter: torch.nn.Parameter) -> Tensor:
        """Return this rank's shard of a parameter in float32, gathered from the data-parallel ranks' masters.

        A collective for parameters that have any.
        """
        if parameter.dtype == torch.float32:
            return parameter.detach()
        return self._gathered(parameter, lambda _, main: main.detach())

    def set_master(self, parameter: torch.nn.Parameter, whole: Tensor) -> None:
        """Store this rank's part of ``whole``, its shard of a parameter in float32, if the parameter has a master."""
        owner = self._owner(parameter)
        part = self._part(owner, parameter)
        if part is not None and parameter.dtype != torch.float32:
            self._main(owner, parameter).detach().copy_(whole.reshape(-1)[part])

    def _gathered(self, parameter: torch.nn.Parameter, of: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Return what the data-parallel ranks keep of a parameter: ``of`` an optimizer and the master of a part."""
        owner = self._owner(parameter)
        whole = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        part = self._part(owner, parameter)
        if part is not None:
            whole.view(-1)[part] = of(owner, self._main(owner, parameter)).to(whole.device)
        dist.all_reduce(whole, group=owner.data_parallel_group)
        return whole

    def set_moment(self, parameter: torch.nn.Parameter, moment: Tensor, *, key: str, steps: Tensor) -> None:
        """Store this rank's part of ``moment``, that of its shard of a parameter after ``steps`` steps."""
        owner = self._owner(parameter)
        part = self._part(owner, parameter)
        if part is not None:
            state = owner.optimizer.state[self._main(owner, parameter)]
            state[key] = moment.reshape(-1)[part].clone().to(self._device)
            state["step"] = steps.clone()

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

    def _part(self, owner: Any, parameter: torch.nn.Parameter) -> slice | None:
        """Return the slice of a flattened parameter whose moments this rank keeps; None if it keeps none."""
        if parameter not in owner.model_param_gbuf_map:
            return None
        found = owner._get_model_param_range_map(parameter)["param"]
        return slice(found.start, found.end)

    def _main(self, owner: Any, parameter: torch.nn.Parameter) -> Tensor:
        group, place = owner.model_param_group_index_map[parameter]
        return owner.optimizer.param_groups[group]["params"][place]
