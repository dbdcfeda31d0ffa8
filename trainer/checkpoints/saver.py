"""Writes checkpoints while training goes on: a copy on the host, files in the background, one rename at the end.

    training thread   copy ──────────────> next steps ...                          ──> durable(): the queue may forget
    background        shards, files ──> digests ──> manifest ──> rename ──> retention ──┘

Every rank has one ``Saver``; its background thread speaks to the others' through a process group of its own.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from rl_async.errors import CheckpointFailed
from rl_async.files import force_to_disk
from rl_async.threads import in_daemon_thread
from rl_async.trainer.backends.interface import Backend
from rl_async.trainer.checkpoints.folder import CheckpointState, begin, publish, temporary_folder
from rl_async.trainer.checkpoints.manifest import FileDigest, digest, files_in, write_manifest

log = logging.getLogger("rl_async.checkpoint")

DIGESTS = ".digests-rank"


class Saver:
    """Keeps the newest ``keep`` checkpoints in ``root``. All ranks call ``save`` and ``wait`` alike.

    At most one checkpoint is being written; ``timeout_s`` is how long that may take. Making one is a collective.
    """

    def __init__(self, root: Path, keep: int, timeout_s: float) -> None:
        self._root, self._keep, self._timeout_s = root, keep, timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._flight: Future[None] | None = None
        self._step = -1  # of the newest checkpoint that was begun
        self._durable: int | None = None

    @property
    def newest(self) -> int:
        """Completed steps in the newest checkpoint, whether it is durable yet or not; -1 before the first."""
        return self._step

    def save(self, backends: Mapping[str, Backend], state: CheckpointState, snapshot: bytes) -> None:
        """Copy what is to be saved and go on; ``backends`` is by folder within the checkpoint. A collective.

        Waits for the checkpoint before. Raises CheckpointFailed if that one, or the copy, came to nothing.
        """
        self.wait()
        temporary = temporary_folder(self._root, state.step)
        try:
            self._together(lambda: begin(temporary, backends) if dist.get_rank() == 0 else None)
        except CheckpointFailed as error:
            raise CheckpointFailed(f"step {state.step}: {error}") from error
        writers = [backend.stage(temporary / name, self._group) for name, backend in backends.items()]
        random = torch.get_rng_state()

        def write() -> None:
            began = time.monotonic()
            for writer in writers:
                self._together(writer)
            self._together(lambda: self._own_files(temporary, random, state, snapshot))
            self._together(lambda: self._sum_up(temporary))
            self._together(lambda: self._publish(temporary, state.step))
            log.info("checkpoint after step %d, written in %.1f s", state.step, time.monotonic() - began)

        self._step, self._flight = state.step, in_daemon_thread(write, "checkpoint")

    def durable(self) -> int | None:
        """The step of a checkpoint that became durable since the last call. Raises CheckpointFailed if it did not."""
        if self._flight is not None and self._flight.done():
            self.wait()
        step, self._durable = self._durable, None
        return step

    def wait(self) -> None:
        """Until the checkpoint that is being written is durable. Raises CheckpointFailed, also after ``timeout_s``."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            flight.result(self._timeout_s)
        except TimeoutError as error:
            raise CheckpointFailed(
                f"step {self._step}: not written within {self._timeout_s:.0f} s (trainer.collective_timeout_s)"
            ) from error
        except CheckpointFailed as error:
            raise CheckpointFailed(f"step {self._step}: {error}") from error
        self._durable = self._step

    def _own_files(self, folder: Path, random: torch.Tensor, state: CheckpointState, snapshot: bytes) -> None:
        save_file({"torch": random}, folder / f"random-rank{dist.get_rank()}.safetensors")
        if dist.get_rank() == 0:
            (folder / "queue.msgpack").write_bytes(snapshot)
            (folder / "state.json").write_bytes(msgspec.json.encode(state))

    def _sum_up(self, folder: Path) -> None:
        """Every rank forces its part of the files to disk and sums them up; no rank reads all."""
        names = [name for name in files_in(folder) if DIGESTS not in name][dist.get_rank() :: dist.get_world_size()]
        for name in names:
            force_to_disk(folder / name)
        digests = {name: digest(folder / name) for name in names}
        (folder / f"{DIGESTS}{dist.get_rank()}").write_bytes(msgspec.json.encode(digests))

    def _publish(self, folder: Path, step: int) -> None:
        if dist.get_rank() != 0:
            return
        digests: dict[str, FileDigest] = {}
        for part in folder.glob(f"{DIGESTS}*"):
            digests |= msgspec.json.decode(part.read_bytes(), type=dict[str, FileDigest])
            part.unlink()
        write_manifest(folder, digests)
        publish(folder, self._root, step, self._keep)

    def _together(self, work: Callable[[], None]) -> None:
        """Do the work on all ranks. Raises CheckpointFailed on all of them if one could not."""
        failure: OSError | SafetensorError | None = None
        try:
            work()
        except (OSError, SafetensorError) as error:  # a full disk is either, by who was writing
            failure = error
        failed = torch.tensor([failure is not None], dtype=torch.int64)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        if failure is not None:
            raise CheckpointFailed(f"rank {dist.get_rank()}: {failure}") from failure
        if failed.item():
            raise CheckpointFailed("another rank could not write; its log says why")
