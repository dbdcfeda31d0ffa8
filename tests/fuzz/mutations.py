"""Ways to damage bytes, shared by the fuzzers of the queue and of the HTTP servers."""

import random
from collections.abc import Callable


def flip(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """Some bits."""
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """The end, or the beginning."""
    at = rng.randint(0, len(frame))
    return rng.choice([frame[:at], frame[at:]])


def insert(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """Random bytes, or a MessagePack head that promises much."""
    heads = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 2000]
    at = rng.randint(0, len(frame))
    return frame[:at] + rng.choice([rng.randbytes(rng.randint(1, 9)), *heads]) + frame[at:]


def splice(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """The beginning of one message and the end of another."""
    return frame[: rng.randint(0, len(frame))] + other[rng.randint(0, len(other)) :]


MUTATIONS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (flip, cut, insert, splice)
