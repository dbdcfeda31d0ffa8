"""Keys and values of token prefixes that later prompts may begin with: the last turn's conversation, a group's prompt.

A block holds those of BLOCK tokens, of all layers, and is known by its tokens and the block before it, exactly and not
by a hash that two prefixes could share. All blocks are of the weights in use: ``clear`` is called when these change.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16  # tokens
Key = tuple[int, tuple[int, ...]]  # number of the block before it, its tokens


@dataclass(frozen=True)
class Block:
    """``data`` is [layers, 2, kv_heads, BLOCK, head_dim]: keys and values; ``routes`` [BLOCK, layers, k]: experts."""

    number: int
    data: Tensor
    routes: Tensor | None = None  # None: not recorded


class PrefixCache:
    """Blocks in the order of their last use; a block counts as used after those behind it, which are evicted first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self._numbers = itertools.count(1)
        self._block_bytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes that the blocks hold."""
        return len(self._blocks) * self._block_bytes

    def find(self, tokens: Sequence[int]) -> list[Block]:
        """Return the blocks of the longest known prefix that leaves at least one token to compute."""
        return self._walk(tokens[:-1])

    def keep(
        self,
        tokens: Sequence[int],
        read: Callable[[int, int], Tensor],
        room: int,
        routes: Callable[[int, int], Tensor | None] = lambda start, end: None,
    ) -> None:
        """Keep the whole blocks of ``tokens``, evicting others so that all together hold at most ``room`` tokens.

        ``read(start, end)`` returns keys and values, [layers, 2, kv_heads, end - start, head_dim], and ``routes`` the
        experts that these tokens went through, [end - start, layers, k], if they are recorded.
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
        """Evict the least recently used blocks until the others hold at most ``room`` tokens."""
        while len(self._blocks) * BLOCK > room:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()

    def _walk(self, tokens: Sequence[int]) -> list[Block]:
        """Return the known blocks that ``tokens`` begin with, and count them as used."""
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


def joined_routes(blocks: Sequence[Block]) -> Tensor | None:
    """Return the experts of the blocks' tokens as one tensor [tokens, layers, k]; None if none are recorded."""
    parts = [block.routes for block in blocks if block.routes is not None]
    return torch.cat(parts) if parts else None
