"""Checksums of a bucket's bytes: of two kinds, each the quickest where the bytes are, both computable anywhere.

On the host it is xxh3_128. On an accelerator it is two sums of integer products, which torch computes there without
moving the bytes; being sums modulo 2^64 they do not depend on the order, so every device finds the same bits. They
guard against faults, not against forgery: any single changed word is found, and of other changes all but about one
in 2^32.
"""

import torch
import xxhash
from torch import Tensor

SUMS = "sums:"  # begins a checksum of the second kind
BLOCK = 1 << 15  # words of eight bytes that share a factor
AT_ONCE = 1 << 7  # blocks whose products exist at the same time: 32 MiB


def checksum(data: Tensor) -> str:
    """Return the checksum of a tensor's bytes, uint8[nbytes], of the kind that is quickest on its device."""
    return _xxh3(data) if data.device.type == "cpu" else _hex(sums(data))


def checksum_like(expected: str, data: Tensor) -> str:
    """Return the checksum of ``data``, uint8[nbytes], of the same kind as ``expected``."""
    return _hex(sums(data)) if expected.startswith(SUMS) else _xxh3(data.cpu())


def sums(data: Tensor) -> Tensor:
    """Return both sums over the bytes of ``data``, uint8[nbytes], as int64[2] on its device, without waiting for it.

    The bytes are words x of 64 bits, in the machine's order, the last one filled up with zeros. A word in block b at
    place i counts as f(i) g(b) x in the first sum and as f(i) g(b) (x >> 32) in the second, without which changes in
    the upper bits of several words could cancel out. f and g are odd. The number of bytes is added to both.
    """
    whole = data.numel() // (8 * BLOCK)
    end = 8 * BLOCK * whole
    if data.storage_offset() % 8:
        data = data.clone()
    factors = _factors(BLOCK, 0, data.device)
    parts = [_block_sums(some, factors) for some in data[:end].view(torch.int64).view(whole, BLOCK).split(AT_ONCE)]
    rest = data.new_zeros(-(-(data.numel() - end) // 8) * 8)
    rest[: data.numel() - end] = data[end:]
    parts.append(_block_sums(rest.view(torch.int64)[None], factors[: rest.numel() // 8]))
    of_blocks = torch.cat(parts, dim=1)
    return (of_blocks * _factors(whole + 1, BLOCK, data.device)).sum(1) + data.numel()


def _block_sums(words: Tensor, factors: Tensor) -> Tensor:
    """Return both sums of each block, int64[2, blocks], of its words int64[blocks, n] times int64[n]."""
    return torch.stack([(words * factors).sum(1), ((words >> 32) * factors).sum(1)])


def _factors(count: int, first: int, device: torch.device) -> Tensor:
    """Return odd numbers that look random, int64[count]: outputs of SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = torch.arange(first + 1, first + 1 + count, device=device) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return (state ^ _shifted(state, 31)) | 1


def _shifted(words: Tensor, by: int) -> Tensor:
    """Return the words shifted to the right by this many bits, filled up with zeros."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _hex(both: Tensor) -> str:
    return SUMS + "".join(f"{value % (1 << 64):016x}" for value in both.tolist())


def _xxh3(data: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
