"""Checkpoints on disk. A folder exists only when it is complete; ``step-000010`` is the state after 10 steps.

model/               Hugging Face folder (float32 master weights), usable by any other tool; if
                     trainer.checkpoint_hf is off it has no weights, and ``rl-async export`` assembles them
shards/              weights and optimizer, safetensors files of each rank
value_head.safetensors     of a critic, or of a policy that shares its backbone with one
critic/              the same three for a critic with a model of its own
random-rankN.safetensors   torch's random state
queue.msgpack        what the queue needs to admit unfinished work again
state.json           step, lineage, KL coefficient and the format version
manifest.json        sizes and checksums of all other files

Format 1 had whole tensors in optimizer.safetensors and no manifest. Format 2 had a manifest; the Megatron backend still
wrote whole tensors, and the FSDP2 backend the number of steps with each parameter. Runs can resume from both, from the
first without verification.
"""

import itertools
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import CheckpointDamaged
from rl_async.files import UNDECODABLE, force_to_disk, make_durable_folder
from rl_async.trainer.backends.interface import Backend
from rl_async.trainer.checkpoints.manifest import MANIFEST, damage

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
    if final.exists():  # only after a resume, from the abandoned lineage
        final.rename(replaced)
    temporary.rename(final)
    force_to_disk(root)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(root: Path, keep: int, spared: Collection[int]) -> None:
    """Delete all but the newest ``keep`` checkpoints and those of the steps ``spared``."""
    for old in list_checkpoints(root)[:-keep]:
        if _step_of(old) not in spared:
            hidden = old.rename(root / f".{old.name}.old{UNFINISHED}")  # so that a partly deleted one is not listed
            shutil.rmtree(hidden)


def drop_unfinished(root: Path) -> None:
    """Delete folders that a crash left partly written or partly deleted."""
    for path in root.glob(f".{PREFIX}*{UNFINISHED}"):
        shutil.rmtree(path)


def list_checkpoints(root: Path) -> list[Path]:
    """List the complete checkpoints, oldest first. One of a newer lineage is newer, whatever its step."""
    found = (path for path in root.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())
    return sorted((path for path in found if (path / "state.json").is_file()), key=_age)


def _age(folder: Path) -> tuple[float, int]:
    try:
        lineage: float = read_state(folder).lineage
    except UNDECODABLE:
        lineage = math.inf  # looked at first, and found damaged
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
    """Describe the damage of a checkpoint, naming the file; None if there is none, or if format 1 has no checksums."""
    try:
        state = read_state(folder)
    except UNDECODABLE as error:
        return f"{folder / 'state.json'}: {error}"
    if state.format > FORMAT:
        raise CheckpointDamaged(
            f"{folder} has format {state.format}, and this version of rl-async reads up to {FORMAT}; use a newer one"
        )
    return None if state.format == 1 else damage(folder)


def read_state(folder: Path) -> CheckpointState:
    """Read ``state.json`` of a checkpoint."""
    return msgspec.json.decode((folder / "state.json").read_bytes(), type=CheckpointState)


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
