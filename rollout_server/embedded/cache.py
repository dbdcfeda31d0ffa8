"""The engine's caches: keys and values of running sequences and of prefixes, and the experts of their tokens.

``SlotCache`` has a slot for each running sequence, slots 0 to n-1 in use, each filled to its own length. The last slots
are moved into freed ones, so that slots in use stay contiguous and a decode step reads plain views.

``PrefixCache`` holds prefixes that later prompts may begin with: the last turn's conversation, a group's prompt. A
block holds the keys and values of BLOCK tokens in all layers. Its key is the previous block and its tokens, those of an
image being that image's SHA-256. It is not a hash of the prefix, which two prefixes could share. All blocks belong to
the weights in use: ``clear`` is called when these change.

``RouteRecorder`` records the experts that a model's routers choose, so that the trainer can replay them.

Layers that carry a state from token to token (gated delta nets, short convolutions) have one for each slot. Attention
ignores padding behind a prompt, but such a layer would take it into its state. So a padded pass over whole prompts
calls the layer once for each length, without padding, and keeps the states that the prompts end with; a decode step
goes on from those. States of a prompt's middle are not kept, so prefixes of earlier prompts are not reused.
"""

import itertools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from rl_async.errors import UserError
from rl_async.model_files import experts_of, mixers_of


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


class RouteRecorder:
    """Records the choices of a decoder's routers. ``shape`` is (layers, experts per token); layers without experts have
    zeros."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.shape = config.num_hidden_layers, config.num_experts_per_tok
        self.dtype = torch.uint8 if experts_of(config) <= 256 else torch.int16
        self._chosen: dict[int, Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            if router := getattr(layer.mlp, "gate", None):
                router.register_forward_hook(partial(self._note, number))

    def _note(self, layer: int, _module: nn.Module, _arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the experts [N, k] that a router chose, the last output of Transformers' routers."""
        self._chosen[layer] = output[2]

    def take(self, rows: int, width: int) -> Tensor:
        """Return the choices of the last pass over ``rows`` sequences of ``width`` tokens, [rows, width, layers, k]."""
        device = next(iter(self._chosen.values())).device
        chosen = torch.zeros((rows * width, *self.shape), dtype=self.dtype, device=device)
        for layer, experts in self._chosen.items():
            chosen[:, layer] = experts.to(self.dtype)
        self._chosen.clear()
        return chosen.unflatten(0, (rows, width))


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, kv_heads, length, head_dim], written where the owning cache says."""

    keys: Tensor
    values: Tensor

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        # A reference cycle would hold the memory until Python collects garbage.
        self._owner: SlotCache = weakref.proxy(owner)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values with the dtype and device of the first ones written."""
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
        """Write whole prompts, their ends, or one position per slot; return the keys and values to attend to."""
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
        """Return the mask size for whole prompts, which only attend to their own keys; other passes have a mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _SlotRoutes:
    """The experts of each slot's tokens, [slots, length, layers, k], placed like their keys and values."""

    def __init__(self, owner: "SlotCache", shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._owner: SlotCache = weakref.proxy(owner)
        self.experts = torch.zeros((0, 0, *shape), dtype=dtype, device=owner.device)

    def resize(self, used: int, width: int) -> None:
        old, owner = self.experts, self._owner
        self.experts = old.new_zeros((owner.slots, owner.length, *old.shape[2:]))
        self.experts[:used, :width] = old[:used, :width]

    def update(self, chosen: Tensor) -> None:
        """Write the experts of the last pass, [rows, width, layers, k], where it wrote keys and values."""
        owner, (count, width) = self._owner, chosen.shape[:2]
        if owner.positions is None:
            self.experts[owner.first : owner.first + count, :width] = chosen
        elif owner.picked is None:
            self.experts[owner.slot_numbers[:count], owner.positions] = chosen[:, 0]
        else:
            rows, columns = owner.picked
            self.experts[owner.first + rows, owner.positions] = chosen[rows, columns]


class SlotCache(Cache):
    """Cache of all layers, for at most ``capacity`` tokens. ``prefill_at``, ``extend_at`` or ``decode_at`` determines
    where the next forward pass writes. With a ``recorder`` it also holds the experts of tokens."""

    def __init__(
        self,
        layers: int,
        max_slots: int,
        max_length: int,
        capacity: int,
        device: torch.device,
        recorder: RouteRecorder | None = None,
    ) -> None:
        self.max_slots, self.max_length, self.capacity, self.device = max_slots, max_length, capacity, device
        self.slots = self.length = 0
        self.slot_numbers = torch.arange(max_slots, device=device)
        self.first = self.view = 0
        # The lengths of the prompts of a pass over whole ones.
        self.lengths: list[int] = []
        self.states: dict[int, SlotStates] = {}
        self.positions: Tensor | None = None
        # The rows and columns of real tokens in a padded pass.
        self.picked: tuple[Tensor, Tensor] | None = None
        self._slot_layers = [_SlotLayer(self) for _ in range(layers)]
        self._recorder = recorder
        self._routes = None if recorder is None else _SlotRoutes(self, recorder.shape, recorder.dtype)
        super().__init__(layers=list(self._slot_layers))

    @property
    def tokens(self) -> int:
        """The number of tokens that the allocated memory can hold."""
        return self.slots * self.length

    def fits(self, slots: int, length: int) -> bool:
        """Whether this many slots of this length are within the capacity."""
        return slots * length <= self.capacity

    def reserve(self, slots: int, length: int, used: int, width: int) -> bool:
        """Grow to at least this size, which fits, keeping the first ``used`` slots, positions below ``width``.

        If nothing has to be kept and much less memory would do, the cache shrinks instead. Return whether the memory
        was allocated anew.
        """
        if not used and self.tokens > 8 * math.prod(self._ample(slots, length)):
            self.slots = self.length = 0
        if slots <= self.slots and length <= self.length:
            return False
        self.slots, self.length = self._size(slots, length)
        for layer in self._slot_layers:
            layer.resize(used, width)
        for states in self.states.values():
            states.resize(self.slots, used)
        if self._routes is not None:
            self._routes.resize(used, width)
        return True

    def _size(self, slots: int, length: int) -> tuple[int, int]:
        """Return a size with room to grow, as far as the capacity allows."""
        ample = self._ample(slots, length)
        larger = max(ample[0], self.slots), max(ample[1], self.length)
        some = slots, min(self.max_length, length + length // 4)
        choices = (size for size in (larger, ample, some) if self.fits(*size))
        return next(choices, (slots, min(self.max_length, self.capacity // slots)))

    def _ample(self, slots: int, length: int) -> tuple[int, int]:
        return min(self.max_slots, max(16, _doubled(slots))), min(self.max_length, max(64, _doubled(length)))

    def prefill_at(self, first: int, lengths: list[int]) -> None:
        """Have the next pass write row i of its batch, of this length, into slot ``first + i``, from position 0."""
        self.first, self.lengths, self.positions, self.picked = first, lengths, None, None

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
                if layer.is_initialized:
                    layer.move(a, b, width)
            for states in self.states.values():
                states.move(a, b)
            if self._routes is not None:
                self._routes.experts[b, :width] = self._routes.experts[a, :width]

    def record(self, rows: int, width: int) -> None:
        """Keep the experts of the tokens [rows, width] of the last pass, if they are recorded."""
        if self._routes is not None and self._recorder is not None:
            self._routes.update(self._recorder.take(rows, width))

    def routes(self, slot: int, start: int, end: int) -> Tensor | None:
        """Return a copy of the experts of a slot's tokens, [end - start, layers, k]; None if they are not recorded."""
        return None if self._routes is None else self._routes.experts[slot, start:end].clone()

    def write_routes(self, slot: int, experts: Tensor) -> None:
        """Write the experts of a slot's first tokens, which ``routes`` returned."""
        assert self._routes is not None
        self._routes.experts[slot, : len(experts)] = experts

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
        """Return the bytes allocated for keys and values and states of all layers, and for experts."""
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._slot_layers if layer.is_initialized)
        held += sum(states.nbytes for states in self.states.values())
        return held + (0 if self._routes is None else self._routes.experts.nbytes)


def cache_tokens(
    model: Any, max_batch: int, max_length: int, cache_bytes: int | None, recorder: RouteRecorder | None = None
) -> int:
    """Return the capacity of the cache in tokens. Raises UserError if the longest sequence would not fit."""
    config, most = model.config.get_text_config(), 2 * max_batch * max_length
    if cache_bytes is None:
        return most
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    elements = 2 * config.num_hidden_layers * (config.num_key_value_heads or heads) * head_dim
    each = elements * next(model.parameters()).dtype.itemsize
    each += 0 if recorder is None else math.prod(recorder.shape) * recorder.dtype.itemsize
    if cache_bytes < each * max_length:
        raise UserError(
            f"rollout.cache_bytes: {cache_bytes:,} bytes do not hold one sequence of rollout.max_model_len="
            f"{max_length} tokens, of {each:,} bytes each; raise it to at least {each * max_length}, or lower that"
        )
    return min(most, cache_bytes // each)


def _doubled(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


# The number of tokens in a block.
BLOCK = 16
# A token, or the hash of the image that it stands for.
Item = int | str
# The number of the previous block, and the items of this one.
Key = tuple[int, tuple[Item, ...]]


@dataclass(frozen=True)
class Block:
    """Keys and values of BLOCK tokens, ``data`` [layers, 2, kv_heads, BLOCK, head_dim], and their experts, if recorded,
    ``routes`` [BLOCK, layers, k]."""

    number: int
    data: Tensor
    routes: Tensor | None = None


class PrefixCache:
    """Blocks in the order of their last use. A block counts as used later than its successors, which are evicted
    first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self._numbers = itertools.count(1)
        self._block_bytes = 0

    @property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        return len(self._blocks) * self._block_bytes

    def find(self, tokens: Sequence[Item]) -> list[Block]:
        """Return the blocks of the longest known prefix that leaves at least one token to compute."""
        return self._walk(tokens[:-1])

    def keep(
        self,
        tokens: Sequence[Item],
        read: Callable[[int, int], Tensor],
        room: int,
        routes: Callable[[int, int], Tensor | None] = lambda start, end: None,
    ) -> None:
        """Keep the whole blocks of ``tokens``, evicting others so that all together hold at most ``room`` tokens.

        ``read(start, end)`` returns keys and values, [layers, 2, kv_heads, end - start, head_dim], and ``routes`` the
        experts of these tokens, [end - start, layers, k], if they are recorded.
        """
        end = min(len(tokens), room) // BLOCK * BLOCK
        known = self._walk(tokens[:end])
        start = len(known) * BLOCK
        if start == end:
            return
        data, experts = read(start, end), routes(start, end)
        number = known[-1].number if known else 0
        for at in range(start, end, BLOCK):
            part = slice(at - start, at - start + BLOCK)
            chosen = None if experts is None else experts[part].clone()
            block = Block(next(self._numbers), data[..., part, :].clone(), chosen)
            self._blocks[number, tuple(tokens[at : at + BLOCK])] = block
            number = block.number
            self._block_bytes = block.data.nbytes + (0 if chosen is None else chosen.nbytes)
        self._walk(tokens[:end])
        self.shrink(room)

    def shrink(self, room: int) -> None:
        """Evict the least recently used blocks until the rest holds at most ``room`` tokens."""
        while len(self._blocks) * BLOCK > room:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    def _walk(self, tokens: Sequence[Item]) -> list[Block]:
        """Return the known blocks at the beginning of ``tokens``, and mark them as used."""
        keys: list[Key] = []
        found: list[Block] = []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            key = (found[-1].number if found else 0, tuple(tokens[end - BLOCK : end]))
            block = self._blocks.get(key)
            if block is None:
                break
            keys.append(key)
            found.append(block)
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        return found


def joined(blocks: Sequence[Block]) -> Tensor:
    """Return the blocks' keys and values as one tensor [layers, 2, kv_heads, tokens, head_dim]."""
    return torch.cat([block.data for block in blocks], dim=-2)
