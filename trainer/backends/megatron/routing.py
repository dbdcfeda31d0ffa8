"""Router replay with Megatron-Core: its routers take their experts from a record, as ``model/routing.py`` says."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backends.megatron.mapping import Shape
from rl_async.trainer.backends.megatron.model import shares_tokens
from rl_async.trainer.backends.megatron.parallel import Parallel
from rl_async.trainer.model.routing import is_replayed

Choice = tuple[Tensor, Tensor]  # scores and experts, [N, k]


class ReplayedRouter:
    """Stands in for Megatron-Core's ``RouterReplay``, which knows no tokens without a record."""

    def __init__(self, layer: int) -> None:
        self.layer = layer  # of the whole model, from 0
        self.record: Tensor | None = None  # int16 [N, k]; None: nothing is replayed
        self.same: Tensor | None = None  # bool [N], where the router would have chosen the same experts

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
    """Let the routers of a part of the model replay records; return what they read them from."""
    found = []
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = ReplayedRouter(module.layer_number - 1)
            found.append(module.router_replay)
    return found


def hand_out(routers: Sequence[ReplayedRouter], experts: Tensor | None) -> None:
    """Have the next pass replay a record, int16 [N, layers, k]; None: route by itself."""
    for router in routers:
        router.record = None if experts is None else experts[:, router.layer]
        router.same = None


def agreement(routers: Sequence[ReplayedRouter]) -> Tensor | None:
    """Return the share of layers that agreed with the record in the last pass, float32 [N]; None without a record."""
    same = [router.same for router in routers if router.same is not None]
    return torch.stack(same).float().mean(0) if same else None
