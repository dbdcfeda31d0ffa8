"""The states of layers that carry one from token to token (gated delta nets, short convolutions), slot by slot.

Attention ignores padding behind a prompt, but such a layer would take it into its state. So a padded pass over whole
prompts calls the layer once for each length, without padding, and keeps the states that the prompts end with; a decode
step goes on from those. States of a prompt's middle are not kept, so prefixes of earlier prompts are not reused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_async.model_files import mixers_of


class SlotStates:
    """The convolution's and the recurrent state of one layer, [slots, ...] each; None until the first ones come."""

    def __init__(self) -> None:
        self.conv: Tensor | None = None
        self.recurrent: Tensor | None = None

    def resize(self, slots: int, used: int) -> None:
        """Reallocate to ``slots``, keeping the first ``used``."""
        for name in ("conv", "recurrent"):
            old = getattr(self, name)
            if old is not None:
                new = old.new_zeros((slots, *old.shape[1:]))
                new[:used] = old[:used]
                setattr(self, name, new)

    def write(self, at: Tensor, slots: int, states: "_LayerStates") -> None:
        """Write the states of a pass into the slots ``at``, of so many."""
        for name in ("conv", "recurrent"):
            new, held = getattr(states, name), getattr(self, name)
            if new is None:
                continue
            if held is None:
                held = new.new_zeros((slots, *new.shape[1:]))
                setattr(self, name, held)
            held[at] = new

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the states of the slots ``source`` to the slots ``target``, each int64 [n]."""
        for held in (self.conv, self.recurrent):
            if held is not None:
                held[target] = held[source]

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (self.conv, self.recurrent) if held is not None)


class _LayerStates:
    """What one call of one layer finds and leaves, with the methods of Transformers' ``Cache`` that such layers use."""

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *, conv_kernel_size: int) -> Tensor:
        """Keep the last inputs of whole prompts, [rows, channels, tokens], with zeros before short ones."""
        missing = max(0, conv_kernel_size - conv_states.shape[-1])
        conv_states = torch.nn.functional.pad(conv_states, (missing, 0))
        self.conv = conv_states[..., -conv_kernel_size:]
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int) -> Tensor:
        self.recurrent = recurrent_states
        return recurrent_states


def keep_states(model: Any) -> None:
    """Let the layers of a model that carry a state keep it in the ``SlotCache`` that they are called with."""
    for mixer in mixers_of(model):
        mixer.forward = partial(_by_slots, mixer.forward, mixer.layer_idx)


def _by_slots(
    forward: Callable[..., Tensor], layer: int, hidden_states: Tensor, cache: Any = None, **options: Any
) -> Tensor:
    """Call a layer for the slots of a pass, [rows, width, H], each without its padding."""
    # Plain passes of the same model have no slots.
    if not hasattr(cache, "states"):
        return forward(hidden_states, cache=cache, **options)
    held, rows = cache.states.setdefault(layer, SlotStates()), len(hidden_states)
    if cache.positions is not None:
        # A layer changes these views of its states in place, or leaves a new recurrent state.
        conv, recurrent = (None if state is None else state[:rows] for state in (held.conv, held.recurrent))
        states = _LayerStates(conv, recurrent)
        out = forward(hidden_states, cache=states)
        if recurrent is not None and states.recurrent is not recurrent:
            recurrent.copy_(states.recurrent)
        return out
    whole = torch.zeros_like(hidden_states)
    for length in sorted(set(cache.lengths)):
        same = torch.tensor([row for row, other in enumerate(cache.lengths) if other == length], device=whole.device)
        states = _LayerStates()
        whole[same, :length] = forward(hidden_states[same, :length], cache=states)
        held.write(cache.first + same, cache.slots, states)
    return whole
