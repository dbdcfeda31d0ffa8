"""The KV cache: one slot per running sequence, slots 0 to n-1 in use, each at its own length.

Kept contiguous by moving the last slots into freed ones, so that a decode step reads plain views and copies nothing.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, kv_heads, length, head_dim]. Where to write is the cache's business."""

    keys: Tensor
    values: Tensor

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the first keys that are seen; their type and device are the model's."""
        shape = (self._owner.slots, key_states.shape[1], self._owner.length, key_states.shape[3])
        self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        self.is_initialized = True

    def grow(self) -> None:
        """Reallocate to the owner's new size, keeping what is held."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((self._owner.slots, old.shape[1], self._owner.length, old.shape[3]))
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Prefill: write whole prompts into new slots. Decode: write one position per slot and return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self._owner
        if owner.positions is None:
            slots, width = slice(owner.first, owner.first + len(owner.rows)), key_states.shape[2]
            self.keys[slots, :, :width] = key_states[owner.rows]
            self.values[slots, :, :width] = value_states[owner.rows]
            return key_states, value_states
        count = key_states.shape[0]
        each = owner.slot_numbers[:count]
        self.keys[each, :, owner.positions] = key_states[:, :, 0]
        self.values[each, :, owner.positions] = value_states[:, :, 0]
        return self.keys[:count, :, : owner.view], self.values[:count, :, : owner.view]

    def move(self, source: Tensor, target: Tensor, width: int) -> None:
        """Copy slots ``source`` onto ``target``, positions below ``width``."""
        self.keys[target, :, :width] = self.keys[source, :, :width]
        self.values[target, :, :width] = self.values[source, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Prefill attends to its own keys only; decode brings a mask of its own."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """All layers' slots. ``prefill_at`` or ``decode_at`` says where the next forward pass writes."""

    def __init__(self, layers: int, max_slots: int, max_length: int, device: torch.device) -> None:
        self.max_slots, self.max_length, self.device = max_slots, max_length, device
        self.slots, self.length = min(16, max_slots), min(64, max_length)
        self.slot_numbers = torch.arange(max_slots, device=device)
        self.first = self.view = 0
        self.rows = self.slot_numbers[:0]
        self.positions: Tensor | None = None
        self._slot_layers = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, slots: int, length: int) -> None:
        """Make room, in doublings up to the maximum."""
        if slots <= self.slots and length <= self.length:
            return
        while self.slots < slots:
            self.slots = min(2 * self.slots, self.max_slots)
        while self.length < length:
            self.length = min(2 * self.length, self.max_length)
        for layer in self._slot_layers:
            layer.grow()

    def prefill_at(self, first: int, rows: Tensor) -> None:
        """The next pass fills slots from ``first`` on, from position 0, slot ``first + i`` with what its row
        ``rows[i]`` brings."""
        self.first, self.rows, self.positions = first, rows, None

    def decode_at(self, positions: Tensor, view: int) -> None:
        """The next pass writes slot i at ``positions[i]`` and reads positions below ``view``."""
        self.positions, self.view = positions, view

    def move(self, source: list[int], target: list[int], width: int) -> None:
        """Copy slots onto freed ones."""
        if source:
            a, b = torch.tensor(source, device=self.device), torch.tensor(target, device=self.device)
            for layer in self._slot_layers:
                layer.move(a, b, width)

    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._slot_layers if layer.is_initialized)
