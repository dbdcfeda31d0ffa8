"""Router replay: tokens go through the experts that the engine chose, weighed by the trainer's own routers.

R3, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370: a router's
choice is a step function, so that rounding, or weights a step older, send a token through other experts than those that
it was sampled with. Only the choice is replayed. Its weights are the softmax of the trainer's logits over the experts
of the record (for a router that does not normalise, their probabilities), so the router learns through them.

    rows' records ──> Tensors.experts ──> packed as tokens are ──> layer(..., routed_experts) ──> its router

A layer gets the record as an argument, so that it is there again when the layer is recomputed for the backward pass.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import DataError, UserError
from rl_async.model_files import experts_of

log = logging.getLogger("rl_async.trainer")
REPLAYED = ("mixtral", "qwen2_moe", "qwen3_moe")  # whose routers choose by softmax, and return logits, weights, experts


def why_not_replayed(config: Any, *, packs: bool, compiled: bool) -> str | None:
    """Why the routers of a model with this Hugging Face config cannot replay records; None if they can."""
    if config.model_type not in REPLAYED:
        return f"routers of {config.model_type} choose in another way than those of {', '.join(REPLAYED)}"
    if not packs:
        return "its rows are padded, not packed"
    if compiled:
        return "layers are compiled (trainer.compile)"
    return None


def is_replayed(options: TrainerConfig, experts: int, reason: str | None) -> bool:
    """Whether a policy with so many ``experts`` replays those that engines chose, as ``trainer.router_replay`` says.

    ``reason`` is why its routers cannot; None if they can. Raises UserError if it must and cannot; with auto, warns of
    routers that cannot.
    """
    if not experts and options.router_replay != "always":
        return False
    reason = reason if experts else "the model has no experts"
    if options.router_replay == "always" and reason is not None:
        raise UserError(f"trainer.router_replay=always is not possible here: {reason}; use auto")
    if options.router_replay == "auto" and reason is not None:
        log.warning("the experts that engines choose are not replayed in training: %s", reason)
    return options.router_replay != "never" and reason is None


def check_records(experts: Tensor, config: Any) -> None:
    """Raise DataError unless records [B, T, layers, k], on the host, are of a model with this Hugging Face config."""
    shape, count, most = (config.num_hidden_layers, config.num_experts_per_tok), experts_of(config), int(experts.max())
    if tuple(experts.shape[2:]) != shape or most >= count:
        raise DataError(
            f"rows name experts up to {most} in [layers, experts per token] = {list(experts.shape[2:])}, and the model "
            f"has {count} in {list(shape)}; were they sampled with another model.path? trainer.router_replay=never "
            "ignores them"
        )


class RouterReplay:
    """Replays records in the routers of a decoder's layers, and says how often they would have chosen the same."""

    def __init__(self, lm: Any) -> None:
        self._same: list[Tensor] = []  # bool [N] of each layer, of a pass that has not ended
        self._counts = False
        for number, layer in enumerate(lm.base_model.layers):
            if getattr(layer.mlp, "gate", None) is not None:
                layer.forward = _ReplayingLayer(layer, number, self._note)

    def begin(self) -> None:
        """Begin a pass."""
        self._same, self._counts = [], True

    def end(self) -> Tensor:
        """End a pass; return the share of layers whose router would have chosen the record's experts, float32 [N].

        1 for a token without a record. Layers that are recomputed later are not counted again.
        """
        same, self._same, self._counts = self._same, [], False
        return torch.stack(same).float().mean(0)

    def _note(self, same: Tensor) -> None:
        if self._counts:
            self._same.append(same)


class _ReplayingLayer:
    """The forward pass of a layer whose router takes its experts from ``routed_experts`` [N, layers, k], if given.

    Tokens whose record is negative go where the router sends them.
    """

    def __init__(self, layer: Any, number: int, note: Callable[[Tensor], None]) -> None:
        self._layer_forward, self._router_forward = layer.forward, layer.mlp.gate.forward
        self._normalises = getattr(layer.mlp.gate, "norm_topk_prob", True)  # Mixtral's always does
        self._number, self._note = number, note
        self._record: Tensor | None = None
        layer.mlp.gate.forward = self._route

    def __call__(self, *arguments: Any, routed_experts: Tensor | None = None, **named: Any) -> Any:
        self._record = None if routed_experts is None else routed_experts[:, self._number]
        return self._layer_forward(*arguments, **named)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, own_weights, own = self._router_forward(hidden)
        if self._record is None:
            return logits, own_weights, own
        chosen = torch.where(self._record < 0, own, self._record.long())
        weights = logits.float().softmax(-1).gather(1, chosen)
        if self._normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        self._note((chosen.sort(-1).values == own.sort(-1).values).all(-1))
        return logits, weights.to(own_weights.dtype), chosen
