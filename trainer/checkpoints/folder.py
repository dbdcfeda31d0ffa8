"""Checkpoints on disk: a folder is whole or not there. ``step-000010`` holds the state after 10 completed steps.

model/               Hugging Face folder (float32 master weights), usable by any other tool; without weights if
                     trainer.checkpoint_hf is off, when ``rl-async export`` puts them together
shards/              weights and optimizer, each rank's part in a safetensors file of its own
value_head.safetensors     of a critic, or of a policy that shares its backbone with one
critic/              the same three of a critic with a model of its own
random-rankN.safetensors   torch's random state
queue.msgpack        what the queue needs to admit unfinished work again
state.json           step, lineage, the KL's coefficient and the format of all this
manifest.json        sizes and checksums of all others

Format 1 had whole tensors in optimizer.safetensors and no manifest. It can still be gone on from, unverified.
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
    """``step`` completed steps, trained in ``lineage``; ``kl_coef`` is where the controller had got to.

    ``format``: which files there are; without it, the first.
    """

    step: int
    lineage: int
    kl_coef: float
    format: int = 1


class CheckpointSchedule:
    """When to write one. Every rank keeps its own and comes to the same answers, from the headers of whole batches.

    The queue holds the payloads of trained steps until a checkpoint makes going back to them pointless. Were they to
    fill its budget, it would admit too few groups to keep the engines busy; so they may take half of it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._every, self._steps = config.trainer.checkpoint_every, config.trainer.steps
        self._most_bytes = config.queue.max_bytes // 2
        self._unsaved_bytes = 0

    def is_due(self, completed: int, batch_bytes: int) -> bool:
        """Call once after each step; ``batch_bytes``: payloads of the batch it trained. True asks for a checkpoint."""
        self._unsaved_bytes += batch_bytes
        planned = completed == self._steps or (self._every > 0 and completed % self._every == 0)
        full = self._unsaved_bytes >= self._most_bytes
        if not planned and not full:
            return False
        if not planned:
            log.warning(
                "checkpoint after step %d, out of turn: the queue holds %d bytes trained since the last one, half of "
                "queue.max_bytes; raise that or lower trainer.checkpoint_every",
                completed,
                self._unsaved_bytes,
            )
        self._unsaved_bytes = 0
        return True


def folder_of(root: Path, step: int) -> Path:
    """The checkpoint of ``step``."""
    return root / f"{PREFIX}{step:06d}"


def temporary_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written before it gets its name."""
    return root / f".{PREFIX}{step:06d}{UNFINISHED}"


def begin(temporary: Path, names: Iterable[str]) -> None:
    """An empty folder with a folder for each model, without what a crash left of an earlier attempt."""
    shutil.rmtree(temporary, ignore_errors=True)
    for name in names:
        (temporary / name).mkdir(parents=True, exist_ok=True)


def publish(temporary: Path, root: Path, step: int, keep: int) -> None:
    """Give a folder whose files are on disk its name, and delete all but the newest ``keep``."""
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
        shutil.rmtree(old.rename(root / f".{old.name}.old{UNFINISHED}"))  # a part of it must not be listed either


def drop_unfinished(root: Path) -> None:
    """Delete what a crash left half written or half deleted."""
    for path in root.glob(f".{PREFIX}*{UNFINISHED}"):
        shutil.rmtree(path)


def list_checkpoints(root: Path) -> list[Path]:
    """Checkpoints that were written to their end, oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if (path / "state.json").is_file())


def newest_whole(root: Path) -> Path | None:
    """The newest checkpoint whose files are as they were written; None if none was ever written.

    Warns of each that is damaged, naming the file. Raises CheckpointDamaged if all are.
    """
    found = []
    for folder in reversed(list_checkpoints(root)):
        wrong = damage_of(folder)
        if wrong is None:
            return folder
        found.append(wrong)
        log.warning("checkpoint %s is damaged, an older one is used: %s", folder.name, wrong)
    if found:
        raise CheckpointDamaged(
            f"no checkpoint in {root} is as it was written: {'; '.join(found)}; restore one, or delete the run"
        )
    return None


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if nothing is, or if it is of format 1, without sums."""
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
    """How far the checkpoint goes."""
    return msgspec.json.decode((folder / "state.json").read_bytes(), type=CheckpointState)


def load_checkpoint(folder: Path, backends: Mapping[str, Backend]) -> tuple[CheckpointState, bytes]:
    """Load models, optimizers and random state; returns the state and the queue's snapshot. A collective.

    The random state is restored only on as many ranks as wrote one.
    """
    for name, backend in backends.items():
        backend.load(folder / name)
    random = folder / f"random-rank{dist.get_rank()}.safetensors"
    if random.is_file():
        torch.set_rng_state(load_file(random)["torch"])
    return read_state(folder), (folder / "queue.msgpack").read_bytes()
