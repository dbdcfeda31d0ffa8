"""What malloc does with freed memory, and how often Python looks for cycles."""

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The largest number of bytes that glibc takes.
_OWN_MAPPING = 1 << 25

# Other libraries need no call.
_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


class _Collector:
    """Counts the blocks of all threads that keep Python from looking for cycles; the last to end lets it look again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        # Before the first of these blocks.
        self._enabled = False

    def hold(self) -> None:
        with self._lock:
            if not self._blocks:
                self._enabled = gc.isenabled()
                gc.disable()
            self._blocks += 1

    def release(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks and self._enabled:
                gc.enable()


_collector = _Collector()


def reuse_freed_memory() -> None:
    """Let malloc keep freed memory for later use, up to 64 MiB at the end of the heap.

    By default glibc gives blocks of 128 KiB and more back at once, and touching new pages costs several times as much
    as copying a row into pages that are there. It comes to these thresholds by itself in a process that has freed a
    block of 32 MiB, such as one that trains. Other libraries have no such thresholds.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING)
        mallopt(_M_TRIM_THRESHOLD, 2 * _OWN_MAPPING)


def give_back_freed_memory() -> None:
    """Return to the system what malloc keeps of freed memory. glibc does so by itself only above all memory in use."""
    _trim(0)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Do not look for reference cycles inside the block, which makes many objects that have none and stay.

    Decoding a batch would otherwise look several times at everything that the process holds. Blocks of several threads
    may overlap in any order.
    """
    _collector.hold()
    try:
        yield
    finally:
        _collector.release()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Do not look for cycles among what the block imports, neither meanwhile nor later: modules stay.

    Of the processor time of importing torch and Transformers, looking takes a sixth.
    """
    with no_collection():
        yield
    gc.freeze()


def collect_rarely(older: int = 20) -> None:
    """Look for reference cycles after 50,000 new objects instead of 700, and not among those that are here already.

    ``older`` is how many looks come before one that takes in what outlived a look, and how many of these come before
    one at everything. For a process that keeps many objects without cycles: the queue's records, an agent worker's
    episodes. Looking took a tenth of the queue's time, and a third of the worker's.
    """
    gc.freeze()
    gc.set_threshold(50_000, older, older)
