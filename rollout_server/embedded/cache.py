"""The KV cache of running sequences: one slot each, slots 0 to n-1 in use, each filled to its own length.

The last slots are moved into freed ones, so that slots in use stay contiguous and a decode step reads plain views.
"""

import math
from collections.abc import Sequence
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
        heads, dim = key_states.shape[1], key_states.shape[3]
        shape = (self._owner.slots, heads, self._owner.length, dim)
        self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        self.is_initialized = True

    def resize(self, used: int, width: int) -> None:
        """Reallocate to the owner's new size, keeping the first ``used`` slots, positions below ``width``."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((self._owner.slots, old.shape[1], self._owner.length, old.shape[3]))
            new[:used, :, :width] = old[:used, :, :width]
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write whole prompts, their ends, or one position per slot, and return what to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner, (count, _, width, _) = self._owner, key_states.shape
        slots = slice(owner.first, owner.first + count)
        if owner.positions is None:
            self.keys[slots, :, :width] = key_states
            self.values[slots, :, :width] = value_states
            return key_states, value_states
        if owner.picked is None:
            at, new_keys, new_values = owner.slot_numbers[:count], key_states[:, :, 0], value_states[:, :, 0]
        else:
            rows, columns = owner.picked
            at, new_keys, new_values = owner.first + rows, key_states[rows, :, columns], value_states[rows, :, columns]
        self.keys[at, :, owner.positions] = new_keys
        self.values[at, :, owner.positions] = new_values
        return self.keys[slots, :, : owner.view], self.values[slots, :, : owner.view]

    def move(self, source: Tensor, target: Tensor, width: int) -> None:
        """Copy slots ``source`` onto ``target``, positions below ``width``."""
        self.keys[target, :, :width] = self.keys[source, :, :width]
        self.values[target, :, :width] = self.values[source, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask size for whole prompts, which attend to their own keys only; other passes have a mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Cache of all layers, of at most ``capacity`` tokens. ``prefill_at``, ``extend_at`` or ``decode_at`` determines
    where the next forward pass writes."""

    def __init__(self, layers: int, max_slots: int, max_length: int, capacity: int, device: torch.device) -> None:
        self.max_slots, self.max_length, self.capacity, self.device = max_slots, max_length, capacity, device
        self.slots = self.length = 0
        self.slot_numbers = torch.arange(max_slots, device=device)
        self.first = self.view = 0
        self.positions: Tensor | None = None
        self.picked: tuple[Tensor, Tensor] | None = None  # rows and columns of a padded pass that are real tokens
        self._slot_layers = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    @property
    def tokens(self) -> int:
        """The tokens for which memory is allocated."""
        return self.slots * self.length

    def fits(self, slots: int, length: int) -> bool:
        """Whether so many slots of this length are within the capacity."""
        return slots * length <= self.capacity

    def reserve(self, slots: int, length: int, used: int, width: int) -> None:
        """Have at least this size, which fits, keeping the first ``used`` slots, positions below ``width``.

        Memory that was needed once is given back when nothing is kept and much less would do.
        """
        if not used and self.tokens > 8 * math.prod(self._ample(slots, length)):
            self.slots = self.length = 0
        if slots > self.slots or length > self.length:
            self.slots, self.length = self._size(slots, length)
            for layer in self._slot_layers:
                layer.resize(used, width)

    def _size(self, slots: int, length: int) -> tuple[int, int]:
        """Return a size with room to grow, as far as the capacity allows."""
        ample = self._ample(slots, length)
        larger = max(ample[0], self.slots), max(ample[1], self.length)
        some = slots, min(self.max_length, length + length // 4)
        choices = (size for size in (larger, ample, some) if self.fits(*size))
        return next(choices, (slots, min(self.max_length, self.capacity // slots)))

    def _ample(self, slots: int, length: int) -> tuple[int, int]:
        return min(self.max_slots, max(16, _doubled(slots))), min(self.max_length, max(64, _doubled(length)))

    def prefill_at(self, first: int) -> None:
        """Have the next pass write row i of its batch into slot ``first + i``, from position 0."""
        self.first, self.positions, self.picked = first, None, None

    def extend_at(self, first: int, rows: Tensor, columns: Tensor, positions: Tensor, view: int) -> None:
        """Have the next pass write token (rows[j], columns[j]) of its batch into slot ``first + rows[j]`` at
        ``positions[j]``, and read positions below ``view``."""
        self.first, self.picked, self.positions, self.view = first, (rows, columns), positions, view

    def decode_at(self, positions: Tensor, view: int) -> None:
        """Have the next pass write slot i at ``positions[i]`` and read positions below ``view``."""
        self.first, self.picked, self.positions, self.view = 0, None, positions, view

    def move(self, source: Sequence[int], target: Sequence[int], width: int) -> None:
        """Copy the ``source`` slots onto the ``target`` ones, positions below ``width``."""
        if source:
            a, b = torch.tensor(source, device=self.device), torch.tensor(target, device=self.device)
            for layer in self._slot_layers:
                layer.move(a, b, width)

    def read(self, slot: int, start: int, end: int) -> Tensor:
        """Return a copy of a slot's keys and values, [layers, 2, kv_heads, end - start, head_dim]."""
        parts = [part[slot, :, start:end] for layer in self._slot_layers for part in (layer.keys, layer.values)]
        return torch.stack(parts).unflatten(0, (-1, 2))

    def write(self, slot: int, data: Tensor) -> None:
        """Write keys and values that ``read`` returned into a slot, from position 0."""
        for layer, part in zip(self._slot_layers, data, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(part[:1], part[1:])
            layer.keys[slot, :, : data.shape[3]] = part[0]
            layer.values[slot, :, : data.shape[3]] = part[1]

    def nbytes(self) -> int:
        """Return the bytes allocated for keys and values of all layers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._slot_layers if layer.is_initialized)


def _doubled(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()
