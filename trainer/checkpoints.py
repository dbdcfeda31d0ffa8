"""Checkpoints: written while training goes on, found and verified on a resume, and read by any number of ranks.

A folder exists only when it is complete; ``step-000010`` is the state after 10 steps.

    model/               Hugging Face folder (float32 master weights), usable by any other tool; if
                         trainer.checkpoint_hf is off it has no weights, and ``rl-async export`` assembles them
    shards/              weights and optimizer, safetensors files of each rank
    value_head.safetensors     of a critic, or of a policy that shares its backbone with one
    critic/              the same three for a critic with a model of its own
    random-rankN.safetensors   torch's random state
    queue.msgpack        the queue's snapshot, to admit unfinished work again
    state.json           step, lineage, KL coefficient and the format version
    manifest.json        sizes and checksums of all other files

Format 1 had whole tensors in optimizer.safetensors and no manifest. Format 2 had a manifest; the Megatron backend
still wrote whole tensors, and the FSDP2 backend the number of steps with each parameter. Runs can resume from both,
from the first without verification. The manifest is written last and needs no checksum of its own, since a damaged
one does not match the files. To add a file, write it in ``Saver._own_files`` or in a backend's ``stage``; the
manifest covers it.

    training thread   copy ──────────────> next steps ...                          ──> durable(): the queue can retire
    background        shards, files ──> digests ──> manifest ──> rename ──> retention ──┘

Every rank has one ``Saver``; the background threads communicate through a process group of their own.

Each rank writes the shards that it holds, as ``Part``s: boxes of whole tensors, independent of how a backend names or
fuses that memory. So the other backend can read them, on any number of ranks. The format is that of
torch.distributed.checkpoint's (DCP) safetensors storage: a file's header names its tensors and the part of each.
DCP's ``save`` and ``load`` are not used: their plans go from rank to rank as pickles, which anyone who reaches a
rank's socket could forge. Nothing here is pickled, and a rank knows by itself what it writes and reads.
"""

import itertools
import json
import logging
import math
import shutil
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from rl_async.concurrency import in_daemon_thread
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import CheckpointDamaged, CheckpointFailed, RlAsyncError, TrainerReplaced
from rl_async.files import UNDECODABLE, force_to_disk, make_durable_folder
from rl_async.model_files import FileDigest, digest
from rl_async.trainer.backend import Backend
from rl_async.trainer.pretrained import own_part, read_part
from rl_async.weight_sync.layout import ExpertPart, expert_parts, published

log = logging.getLogger("rl_async.checkpoint")

PREFIX = "step-"
UNFINISHED = ".tmp"
DAMAGED = ".damaged"
FORMAT = 3


class CheckpointState(msgspec.Struct, frozen=True):
    """Contents of ``state.json``: ``step`` completed steps in ``lineage``, the KL controller's coefficient, the format.

    A file without ``format`` is of format 1.
    """

    step: int
    lineage: int
    kl_coef: float
    format: int = 1


class CheckpointSchedule:
    """Decides when to write a checkpoint. Every rank has one and decides alike, from the headers of whole batches.

    The queue holds the payloads of trained steps until a checkpoint covers them. If they filled its budget, it would
    admit too few groups to keep the engines busy, so a checkpoint is due at half of ``queue.max_bytes``.
    """

    def __init__(self, config: RunConfig) -> None:
        self._every, self._steps = config.trainer.checkpoint_every, config.trainer.steps
        self._most_bytes = config.queue.max_bytes // 2
        self._unsaved_bytes = 0

    def is_due(self, completed: int, batch_bytes: int) -> bool:
        """Return whether to write a checkpoint; call it once after each step.

        ``batch_bytes`` is the size of the payloads of the batch that the step trained.
        """
        self._unsaved_bytes += batch_bytes
        planned = completed == self._steps or (self._every > 0 and completed % self._every == 0)
        full = self._unsaved_bytes >= self._most_bytes
        if not planned and not full:
            return False
        if not planned:
            log.warning(
                "unscheduled checkpoint of version %d: the queue holds %d bytes trained since the last one, half of "
                "queue.max_bytes; raise that or lower trainer.checkpoint_every",
                completed,
                self._unsaved_bytes,
            )
        self._unsaved_bytes = 0
        return True


def folder_of(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step``."""
    return root / f"{PREFIX}{step:06d}"


def temporary_folder(root: Path, step: int, lineage: int) -> Path:
    """Return the path at which a trainer writes the checkpoint of ``step`` before it gets its name.

    An older trainer, frozen while it writes and thawed beside its successor, writes into another one.
    """
    return root / f".{PREFIX}{step:06d}.lineage{lineage}{UNFINISHED}"


def begin(temporary: Path, names: Iterable[str]) -> None:
    """Create the folder and one within it per model, deleting what a crash left of an earlier attempt.

    The folder around it is durable, as the checkpoint will be in it.
    """
    shutil.rmtree(temporary, ignore_errors=True)
    make_durable_folder(temporary.parent)
    for name in names:
        (temporary / name).mkdir(parents=True, exist_ok=True)


def publish(temporary: Path, root: Path, step: int, allow: Callable[[], None] = lambda: None) -> None:
    """Rename a folder whose files are durable to its final name, unless ``allow``, called just before, raises."""
    final = folder_of(root, step)
    for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
        force_to_disk(folder)
    force_to_disk(temporary / MANIFEST)
    allow()
    replaced = root / f".{final.name}.replaced{UNFINISHED}"
    # It exists only after a resume, from the abandoned lineage.
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    force_to_disk(root)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(root: Path, keep: int, spared: Collection[int]) -> None:
    """Delete all but the newest ``keep`` checkpoints and those of the steps ``spared``."""
    for old in list_checkpoints(root)[:-keep]:
        if _step_of(old) not in spared:
            # Hidden, a partly deleted one is not listed.
            hidden = old.rename(root / f".{old.name}.old{UNFINISHED}")
            shutil.rmtree(hidden)


def drop_unfinished(root: Path) -> None:
    """Delete folders that a crash left partly written or partly deleted."""
    for path in root.glob(f".{PREFIX}*{UNFINISHED}"):
        shutil.rmtree(path)


def list_checkpoints(root: Path) -> list[Path]:
    """List the complete checkpoints, oldest first. One of a newer lineage is newer, regardless of its step."""
    found = (path for path in root.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())
    return sorted((path for path in found if (path / "state.json").is_file()), key=_age)


def _age(folder: Path) -> tuple[float, int]:
    try:
        lineage: float = read_state(folder).lineage
    except CheckpointDamaged:
        # The caller looks at it first, and finds it damaged.
        lineage = math.inf
    return lineage, _step_of(folder)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def newest_whole(root: Path) -> Path | None:
    """Return the newest undamaged checkpoint, to resume from; None if none was ever written.

    Newer ones, which are damaged, are set aside under another name, so that retention does not count them; a warning
    names each and its file. Raises CheckpointDamaged, and leaves all where they are, if all are damaged.
    """
    found: dict[Path, str] = {}
    for folder in reversed(list_checkpoints(root)):
        wrong = damage_of(folder)
        if wrong is None:
            for damaged, why in found.items():
                aside = _set_aside(damaged)
                log.warning("%s is damaged and now called %s; using %s: %s", damaged, aside.name, folder.name, why)
            return folder
        found[folder] = wrong
    if found:
        raise CheckpointDamaged(
            f"all checkpoints in {root} are damaged: {'; '.join(found.values())}; restore one, or delete the run"
        )
    return None


def _set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint; nothing counts or deletes it under its new name."""
    taken = (folder.with_name(f"{folder.name}{DAMAGED}{count or ''}") for count in itertools.count())
    return folder.rename(next(path for path in taken if not path.exists()))


def damage_of(folder: Path) -> str | None:
    """Describe the damage of a checkpoint, naming the file, or return None. Format 1 has no checksums to verify."""
    try:
        state = read_state(folder)
    except CheckpointDamaged as error:
        return str(error)
    if state.format > FORMAT:
        raise CheckpointDamaged(
            f"{folder} has format {state.format}, and this version of rl-async reads up to {FORMAT}; use a newer one"
        )
    return None if state.format == 1 else damage(folder)


def read_state(folder: Path) -> CheckpointState:
    """Read ``state.json`` of a checkpoint. Raises CheckpointDamaged, naming the file, if it is malformed."""
    file = folder / "state.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=CheckpointState)
    except UNDECODABLE as error:
        raise CheckpointDamaged(f"{file}: {error}") from error


def load_checkpoint(folder: Path, backends: Mapping[str, Backend]) -> tuple[CheckpointState, bytes]:
    """Load models, optimizers and random state; return the state and the queue's snapshot. A collective.

    The random state is restored only on ranks that have one in the checkpoint.
    """
    for name, backend in backends.items():
        backend.load(folder / name)
    random = folder / f"random-rank{dist.get_rank()}.safetensors"
    if random.is_file():
        torch.set_rng_state(load_file(random)["torch"])
    return read_state(folder), (folder / "queue.msgpack").read_bytes()


DIGESTS = ".digests-rank"
# A disk may take longer than a collective: this long at least is a checkpoint written before it has failed.
WRITE_S = 1800.0


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
        # The step of the newest checkpoint that was started.
        self._step = -1
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
                f"step {self._step}: not written within {self._timeout_s:.0f} s; the disk of {self._root} is too slow"
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
            try:
                digests |= msgspec.json.decode(part.read_bytes(), type=dict[str, FileDigest])
            except UNDECODABLE as error:
                raise CheckpointFailed(f"{part} is not what a rank wrote there: {error}") from error
            part.unlink()
        write_manifest(folder, digests)
        publish(folder, self._root, step, self._check_lineage)
        # A successor that is not known by now has found this checkpoint, and not an older one.
        self._check_lineage()
        prune(self._root, self._keep, {step, self._resumed})

    def _on_all_ranks(self, work: Callable[[], None]) -> None:
        try:
            on_all_ranks(work, self._group, CheckpointFailed, (*FAILURES, TrainerReplaced))
        except CheckpointFailed as error:
            if isinstance(error.__cause__, TrainerReplaced):
                raise error.__cause__ from None
            # A successor deletes files that it takes for a crashed trainer's.
            self._check_lineage()
            raise


# Names as in a safetensors header.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
SUFFIX = ".safetensors"
# MOMENT separates the name of a parameter from that of an optimizer's tensor, MOMENTS are the latter of AdamW, STEPS
# names the number of optimizer steps, and SHARDING is a key in the header's metadata.
MOMENT = "|"
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = f"schedule{MOMENT}steps"
SHARDING = "DCP_SHARDING_INFO"
NO_NOTES: Mapping[str, str] = {}
# A full disk raises either, depending on who was writing. A missing tensor or another shape is unreadable, too.
FAILURES = (OSError, SafetensorError)
UNREADABLE = (*FAILURES, ValueError, KeyError)


def beyond_adamw(sizes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return those of a checkpoint's tensors, as shapes by name, that AdamW in float32 does not keep.

    Formats before 3 have a number of steps for each parameter, too.
    """
    names = (name for name in sizes if MOMENT in name and name != STEPS)
    return {name: tuple(sizes[name]) for name in names if name.rpartition(MOMENT)[2] not in (*MOMENTS, "step")}


class StoredPart(NamedTuple):
    """A part of a tensor in a file: where it begins in the whole, and its shape."""

    offset: Sequence[int]
    shape: Sequence[int]
    path: str


class Part(NamedTuple):
    """What a rank stores of the tensor ``name``: a box of it, and the numbers there, of the box's shape."""

    name: str
    where: tuple[slice, ...]
    numbers: Tensor


def own_parts(state: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yield what of ``state``, sharded or whole, is for this rank to write, as views. Not a collective.

    Each part of a tensor is written by one rank, known without asking any.
    """
    for name, tensor in state.items():
        part = _part_to_write(name, tensor.detach())
        if part is not None:
            numbers, where = part
            yield Part(name, where, numbers)


def host_copy(parts: Iterable[Part]) -> list[Part]:
    """Copy this rank's parts to host memory, one after the other. Not a collective."""
    return [
        part._replace(numbers=part.numbers.to("cpu", copy=True, memory_format=torch.contiguous_format))
        for part in parts
    ]


def write_shards(parts: Sequence[Part], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write every rank's parts. A collective of ``group``; all files are complete when it returns.

    Raises CheckpointFailed on all ranks if one of them could not write.
    """
    on_all_ranks(lambda: _write_own(parts, folder), group, CheckpointFailed)


def _write_own(parts: Sequence[Part], folder: Path) -> None:
    """Write this rank's parts into one file, or, since a file has each name once, the second parts of tensors into
    another one, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[Part]] = []
    seen = Counter[str]()
    for part in parts:
        if seen[part.name] == len(files):
            files.append([])
        files[seen[part.name]].append(part)
        seen[part.name] += 1
    for number, held in enumerate(files, 1):
        sizes = {name: (DTYPES[numbers.dtype], list(numbers.shape)) for name, _, numbers in held}
        offsets = json.dumps({name: {"saved_offsets": [at.start for at in where]} for name, where, _ in held})
        target = folder / f"shard-{dist.get_rank() + 1:05d}-model-{number:05d}-of-{len(files):05d}{SUFFIX}"
        write_tensors(target, sizes, (part.numbers for part in held), {SHARDING: offsets})


def _part_to_write(name: str, tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]] | None:
    """Return the part of ``tensor`` that this rank writes, and its place; None if other ranks write what it holds.

    Of the ranks that hold the same part one writes it, another one for each name. Rank 0 writes what is not sharded.
    """
    if not isinstance(tensor, DTensor):
        return own_part(tensor) if dist.get_rank() == 0 else None
    mesh = tensor.device_mesh
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    writer = zlib.crc32(name.encode())
    for dim in copies:
        writer, chosen = divmod(writer, mesh.size(dim))
        if mesh.get_local_rank(dim) != chosen:
            return None
    part, where = own_part(tensor)
    return (part, where) if part.numel() else None


def read_shards(state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors of ``state``, sharded or whole, in place. A collective of all ranks.

    Stacked experts may be stored one by one (``weight_sync/layout.py``).
    Raises CheckpointDamaged on all ranks if one of them could not read.
    """
    try:
        on_all_ranks(lambda: _read_own(state, folder), None, CheckpointDamaged, UNREADABLE)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{folder}: {error}") from error


def _read_own(state: Mapping[str, Tensor], folder: Path) -> None:
    """Read this rank's parts, slice by slice."""
    shards = StoredShards(folder)
    for name, tensor in state.items():
        local, where = own_part(tensor.detach())
        parameter, separator, kind = name.partition(MOMENT)
        parts = [] if name in shards.sizes else expert_parts(parameter, tensor.shape)
        if not parts:
            shards.read_into(local, name, where, tensor.shape)
        for part in parts:
            if part.expert in range(where[0].start, where[0].stop):
                expert = local[part.expert - where[0].start, part.rows.start : part.rows.stop]
                shards.read_into(expert, f"{part.name}{separator}{kind}")


class StoredShards:
    """Reads any part of the tensors in a folder of shards. ``sizes`` has the shape of each by its name.

    An expert that is stored stacked with others can be read by the name of its own, too (``weight_sync/layout.py``).
    A file is open for one slice: mapped pages count as a rank's memory.
    """

    def __init__(self, folder: Path) -> None:
        found = stored(folder)
        self.sizes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, described in found.state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata)
            self.sizes[name], self.dtypes[name] = described.size, described.properties.dtype
        self._parts: dict[str, list[StoredPart]] = defaultdict(list)
        for index, place in found.storage_data.items():
            self._parts[index.fqn].append(StoredPart(index.offset, place.shape, place.relative_path))
        self._stacked: dict[str, tuple[str, ExpertPart]] = {}
        for name, size in self.sizes.items():
            parameter, separator, kind = name.partition(MOMENT)
            for part in expert_parts(parameter, size):
                self._stacked[f"{part.name}{separator}{kind}"] = name, part

    def whole(self, name: str) -> Tensor:
        """Assemble a tensor. Raises KeyError for an unknown name."""
        whole = torch.empty(self.sizes[name], dtype=self.dtypes[name])
        self.read_into(whole, name)
        return whole

    def read_into(
        self, local: Tensor, name: str, where: Sequence[slice] | None = None, size: Sequence[int] | None = None
    ) -> None:
        """Fill ``local`` with the part ``where`` of a tensor, by default all of it.

        Raises KeyError for an unknown name, and ValueError if it has not the shape ``size``, by default that
        of ``local``, or parts of it are missing.
        """
        where = [slice(0, count) for count in local.shape] if where is None else where
        found, expected = self._size_of(name), tuple(local.shape if size is None else size)
        if found != expected:
            raise ValueError(f"{name} is {list(found)} there, not {list(expected)}")
        if name in self._stacked:
            name, (_, expert, rows) = self._stacked[name]
            moved = slice(rows.start + where[0].start, rows.start + where[0].stop)
            local, where = local[None], [slice(expert, expert + 1), moved, where[1]]
        left = local.numel()
        for begin, shape, path in self._parts[name]:
            stops = [offset + count for offset, count in zip(begin, shape, strict=True)]
            common = [(max(at.start, b), min(at.stop, s)) for at, b, s in zip(where, begin, stops, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            piece = read_part(path, name, tuple(slice(i - b, j - b) for (i, j), b in zip(common, begin, strict=True)))
            at_home = tuple(slice(i - at.start, j - at.start) for (i, j), at in zip(common, where, strict=True))
            local[at_home].copy_(piece)
            left -= piece.numel()
        if left:
            raise ValueError(f"{name} lacks {left} of its numbers there")

    def _size_of(self, name: str) -> tuple[int, ...]:
        if name in self.sizes:
            return tuple(self.sizes[name])
        if name not in self._stacked:
            raise KeyError(f"there is no tensor {name}")
        stacked, part = self._stacked[name]
        return len(part.rows), self.sizes[stacked][2]


def on_all_ranks(
    work: Callable[[], None],
    group: dist.ProcessGroup | None,
    failed: type[RlAsyncError],
    causes: tuple[type[Exception], ...] = FAILURES,
) -> None:
    """Do ``work`` on all ranks of ``group``. Raises ``failed`` on all of them if one raises of ``causes``.

    A collective.
    """
    failure: Exception | None = None
    try:
        work()
    except causes as error:
        failure = error
    flag = torch.tensor([failure is not None], dtype=torch.int64)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failed(f"rank {dist.get_rank()}: {failure}") from failure
    if flag.item():
        raise failed("another rank failed to read or write its files; see that rank's log")


def stored(folder: Path) -> Metadata:
    """Read the names of the tensors in ``folder`` and their files. Not a collective."""
    return HuggingFaceStorageReader(str(folder)).read_metadata()


def write_whole(folder: Path, target: Path, rename: Callable[[str], str | None], kind: str = "") -> None:
    """Assemble the tensors of ``folder`` into the safetensors file ``target``, one at a time.

    ``rename`` maps each tensor's name to its name in a model of Transformers, or to None to omit it; experts get the
    names of published files of ``kind``, a ``model_type`` (``weight_sync/layout.py``). Not a collective: one process
    does it.
    """
    shards = StoredShards(folder)
    names = {name: new for name in sorted(shards.sizes) if (new := rename(name)) is not None}
    empty = (
        (new, torch.empty(shards.sizes[name], dtype=shards.dtypes[name], device="meta")) for name, new in names.items()
    )
    sizes = {new: (DTYPES[tensor.dtype], list(tensor.shape)) for new, tensor in published(kind, empty)}
    wholes = ((new, shards.whole(name)) for name, new in names.items())
    write_tensors(target, sizes, (tensor for _, tensor in published(kind, wholes)))


def write_tensors(
    target: Path,
    sizes: Mapping[str, tuple[str, list[int]]],
    tensors: Iterable[Tensor],
    notes: Mapping[str, str] = NO_NOTES,
) -> None:
    """Write a safetensors file one tensor at a time; ``sizes`` has their dtypes and shapes, in the same order.

    ``notes`` are added to the metadata of the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **notes}}
    end = 0
    for name, (dtype, shape) in sizes.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Tensors begin at a multiple of 8.
    encoded += b" " * (-len(encoded) % 8)
    with target.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


MANIFEST = "manifest.json"


def files_in(folder: Path) -> list[str]:
    """List every file below ``folder`` except the manifest, as sorted relative paths."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST)


def write_manifest(folder: Path, digests: Mapping[str, FileDigest]) -> None:
    """Write the manifest with the digests of all other files."""
    (folder / MANIFEST).write_bytes(msgspec.json.encode(dict(digests), order="sorted"))


def damage(folder: Path) -> str | None:
    """Describe the first damaged file of a checkpoint; None if all files match the manifest."""
    path = folder / MANIFEST
    try:
        digests = msgspec.json.decode(path.read_bytes(), type=dict[str, FileDigest])
    except (OSError, *UNDECODABLE) as error:
        return f"{path}: {error}"
    for name, written in digests.items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        size = (folder / name).stat().st_size
        if size != written.bytes:
            return f"{folder / name} has {size} bytes instead of {written.bytes}"
        if digest(folder / name) != written:
            return f"{folder / name} has another checksum than the manifest"
    return None
