"""This process's rank along each axis of parallelism, and the process groups of the axes.

Ranks are numbered as in Megatron-Core: tensor-parallel neighbours first, then those that share rows (its context
parallelism, ``trainer.sequence_parallel``), then data-parallel ones, pipeline stages last.
Expert-parallel ranks are ranks of a pipeline stage that divide the experts among themselves.
"""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.batches.data_parallel import DataParallel

SEED = 1  # of Megatron's own random state, which goes unused: all weights are read from files


@dataclass(frozen=True)
class Axis:
    """One kind of parallelism: number of ranks, this process's rank among them, and their process group."""

    size: int
    rank: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Parallel:
    """All axes of parallelism, as this process sees them."""

    tensor: Axis
    context: Axis  # ranks that share each packed row
    pipeline: Axis
    data: Axis
    expert: Axis
    virtual_stages: int  # model chunks per pipeline stage

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def data_parallel(self) -> DataParallel:
        """The tensor- and pipeline-parallel processes that hold one copy of the model are one data-parallel rank, and
        so are all copies that share rows."""
        first = self.tensor.rank == self.context.rank == self.pipeline.rank == 0
        return DataParallel(self.data.rank, self.data.size, is_recorder=first, group=self.data.group)


def join_groups(config: TrainerConfig) -> Parallel:
    """Form Megatron's process groups, once per process. A collective of all ranks.

    Their collectives have the deadline ``trainer.collective_timeout_s``, as the trainer's own group has.
    """
    virtual = config.virtual_pipeline
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            context_parallel_size=config.sequence_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=config.collective_timeout_s / 60,
        )
        model_parallel_cuda_manual_seed(SEED)
    return Parallel(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        context=_axis(parallel_state.get_context_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        expert=_axis(parallel_state.get_expert_model_parallel_group()),
        virtual_stages=virtual,
    )


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(group.size(), group.rank(), group)
