"""Writes checkpoints while training goes on: copies to the host, writes files in the background, renames at the end.

    training thread   copy ──────────────> next steps ...                          ──> durable(): the queue can retire
    background        shards, files ──> digests ──> manifest ──> rename ──> retention ──┘

Every rank has one ``Saver``; the background threads communicate through a process group of their own.
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
from safetensors.torch import save_file

from rl_async.concurrency import in_daemon_thread
from rl_async.errors import CheckpointFailed, TrainerReplaced
from rl_async.files import force_to_disk
from rl_async.trainer.backends.interface import Backend
from rl_async.trainer.checkpoints.folder import CheckpointState, begin, prune, publish, temporary_folder
from rl_async.trainer.checkpoints.manifest import FileDigest, digest, files_in, write_manifest
from rl_async.trainer.checkpoints.shards import FAILURES, on_all_ranks

log = logging.getLogger("rl_async.checkpoint")

DIGESTS = ".digests-rank"


class Saver:
    """Keeps the newest ``keep`` checkpoints in ``root``, and that of step ``resumed``, which this process began with.

    All ranks call ``save`` and ``wait`` alike. One checkpoint is written at a time, within ``timeout_s``. The
    constructor is a collective. ``check_lineage`` raises TrainerReplaced if another trainer has resumed the run.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        timeout_s: float,
        resumed: int = 0,
        check_lineage: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._keep, self._timeout_s = root, keep, timeout_s
        self._resumed, self._check_lineage = resumed, check_lineage
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._flight: Future[None] | None = None
        self._step = -1  # of the newest checkpoint that was started
        self._durable: int | None = None

    @property
    def newest(self) -> int:
        """Completed steps in the newest checkpoint, durable or not; -1 before the first."""
        return self._step

    def save(self, backends: Mapping[str, Backend], state: CheckpointState, snapshot: bytes) -> None:
        """Copy the state to save, and write it in the background. A collective.

        ``backends`` maps folders within the checkpoint to models. Waits for the previous checkpoint first. Raises
        CheckpointFailed if that one, or the folder of this one, could not be written.
        """
        self.wait()
        temporary = temporary_folder(self._root, state.step, state.lineage)
        try:
            self._on_all_ranks(lambda: begin(temporary, backends) if dist.get_rank() == 0 else None)
        except CheckpointFailed as error:
            raise CheckpointFailed(f"step {state.step}: {error}") from error
        writers = [backend.stage(temporary / name, self._group) for name, backend in backends.items()]
        random = torch.get_rng_state()

        def write() -> None:
            began = time.monotonic()
            for writer in writers:
                self._on_all_ranks(writer)
            self._on_all_ranks(lambda: self._own_files(temporary, random, state, snapshot))
            self._on_all_ranks(lambda: self._digest_files(temporary))
            self._on_all_ranks(lambda: self._publish(temporary, state.step))
            log.info("checkpoint of version %d, written in %.1f s", state.step, time.monotonic() - began)

        self._step, self._flight = state.step, in_daemon_thread(write, "checkpoint")

    def durable(self) -> int | None:
        """Return the step of a checkpoint that became durable since the last call, or None.

        Raises CheckpointFailed if writing it failed.
        """
        if self._flight is not None and self._flight.done():
            self.wait()
        step, self._durable = self._durable, None
        return step

    def wait(self) -> None:
        """Block until the checkpoint being written is durable. Raises CheckpointFailed, also after ``timeout_s``."""
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

    def _digest_files(self, folder: Path) -> None:
        """Force this rank's share of the files to disk and write their digests; no rank reads all files."""
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
        publish(folder, self._root, step, self._check_lineage)
        self._check_lineage()  # a successor that is not known by now has found this checkpoint, and not an older one
        prune(self._root, self._keep, {step, self._resumed})

    def _on_all_ranks(self, work: Callable[[], None]) -> None:
        try:
            on_all_ranks(work, self._group, CheckpointFailed, (*FAILURES, TrainerReplaced))
        except CheckpointFailed as error:
            if isinstance(error.__cause__, TrainerReplaced):
                raise error.__cause__ from None
            self._check_lineage()  # a successor deletes what it takes for a crashed trainer's
            raise
