"""The KV cache: one slot per running sequence, slots 0 to n-1 in use, each filled to its own length.

The last slots are moved into freed ones, so that slots in use stay contiguous and a decode step reads plain views.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, kv_heads, length, head_dim]. The owning cache determines where to write."""

    keys: Tensor
    values: Tensor

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values in the dtype and on the device of the first ones to be written."""
        shape = (self._owner.slots, key_states.shape[1], self._owner.length, key_states.shape[3])
        self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        self.is_initialized = True

    def grow(self) -> None:
        """Reallocate to the owner's new size, keeping the contents."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((self._owner.slots, old.shape[1], self._owner.length, old.shape[3]))
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write whole prompts into new slots (prefill), or one position per slot (decode), and return what to attend
        to."""
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
        """Return the mask size for prefill, which attends to its own keys only; decode passes its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Cache of all layers. ``prefill_at`` or ``decode_at`` determines where the next forward pass writes."""

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
        """Grow to at least this size, in doublings up to the maximum."""
        if slots <= self.slots and length <= self.length:
            return
        while self.slots < slots:
            self.slots = min(2 * self.slots, self.max_slots)
        while self.length < length:
            self.length = min(2 * self.length, self.max_length)
        for layer in self._slot_layers:
            layer.grow()

    def prefill_at(self, first: int, rows: Tensor) -> None:
        """Have the next pass write row ``rows[i]`` of its batch into slot ``first + i``, from position 0."""
        self.first, self.rows, self.positions = first, rows, None

    def decode_at(self, positions: Tensor, view: int) -> None:
        """Have the next pass write slot i at ``positions[i]`` and read positions below ``view``."""
        self.positions, self.view = positions, view

    def move(self, source: list[int], target: list[int], width: int) -> None:
        """Copy the ``source`` slots onto the ``target`` ones, positions below ``width``."""
        if source:
            a, b = torch.tensor(source, device=self.device), torch.tensor(target, device=self.device)
            for layer in self._slot_layers:
                layer.move(a, b, width)

    def nbytes(self) -> int:
        """Return the bytes allocated for keys and values of all layers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._slot_layers if layer.is_initialized)
