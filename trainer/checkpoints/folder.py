"""Checkpoints on disk. A folder exists only when it is complete; ``step-000010`` is the state after 10 steps.

model/               Hugging Face folder (float32 master weights), usable by any other tool; if
                     trainer.checkpoint_hf is off it has no weights, and ``rl-async export`` assembles them
shards/              weights and optimizer, one safetensors file per rank
value_head.safetensors     of a critic, or of a policy that shares its backbone with one
critic/              the same three for a critic with a model of its own
random-rankN.safetensors   torch's random state
queue.msgpack        what the queue needs to admit unfinished work again
state.json           step, lineage, KL coefficient and the format version
manifest.json        sizes and checksums of all other files

Format 1 had whole tensors in optimizer.safetensors and no manifest. Runs can still resume from it, without
verification.
"""

import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import CheckpointDamaged
from rl_async.files import force_to_disk
from rl_async.trainer.backends.interface import Backend
from rl_async.trainer.checkpoints.manifest import MANIFEST, damage

log = logging.getLogger("rl_async.checkpoint")

PREFIX = "step-"
UNFINISHED = ".tmp"
FORMAT = 2


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
                "unscheduled checkpoint after step %d: the queue holds %d bytes trained since the last one, half of "
                "queue.max_bytes; raise that or lower trainer.checkpoint_every",
                completed,
                self._unsaved_bytes,
            )
        self._unsaved_bytes = 0
        return True


def folder_of(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step``."""
    return root / f"{PREFIX}{step:06d}"


def temporary_folder(root: Path, step: int) -> Path:
    """Return the path at which the checkpoint of ``step`` is written before it gets its name."""
    return root / f".{PREFIX}{step:06d}{UNFINISHED}"


def begin(temporary: Path, names: Iterable[str]) -> None:
    """Create the folder and one within it per model, deleting what a crash left of an earlier attempt."""
    shutil.rmtree(temporary, ignore_errors=True)
    for name in names:
        (temporary / name).mkdir(parents=True, exist_ok=True)


def publish(temporary: Path, root: Path, step: int, keep: int) -> None:
    """Rename a folder whose files are durable to its final name, and delete all but the newest ``keep``."""
    final = folder_of(root, step)
    for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
        force_to_disk(folder)
    force_to_disk(temporary / MANIFEST)
    replaced = root / f".{final.name}.replaced{UNFINISHED}"
    if final.exists():  # only after a resume, from the abandoned lineage
        final.rename(replaced)
    temporary.rename(final)
    force_to_disk(root)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(
            old.rename(root / f".{old.name}.old{UNFINISHED}")
        )  # renamed first, so that a partly deleted one is not listed


def drop_unfinished(root: Path) -> None:
    """Delete folders that a crash left partly written or partly deleted."""
    for path in root.glob(f".{PREFIX}*{UNFINISHED}"):
        shutil.rmtree(path)


def list_checkpoints(root: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if (path / "state.json").is_file())


def newest_whole(root: Path) -> Path | None:
    """Return the newest undamaged checkpoint; None if none was ever written.

    Logs a warning for each damaged one, naming the file. Raises CheckpointDamaged if all are damaged.
    """
    found = []
    for folder in reversed(list_checkpoints(root)):
        wrong = damage_of(folder)
        if wrong is None:
            return folder
        found.append(wrong)
        log.warning("checkpoint %s is damaged, trying an older one: %s", folder.name, wrong)
    if found:
        raise CheckpointDamaged(
            f"all checkpoints in {root} are damaged: {'; '.join(found)}; restore one, or delete the run"
        )
    return None


def damage_of(folder: Path) -> str | None:
    """Describe the damage of a checkpoint, naming the file; None if there is none, or if format 1 has no checksums."""
    try:
        state = read_state(folder)
    except msgspec.MsgspecError as error:
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
