"""What a run records of the episodes that it trains: ``trained.jsonl`` and the files in ``trajectories/``.

The trainer writes them. Viewers read them, and so do runs that train them again (``rollout.replay``).
"""

import gzip
import hashlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rl_async.errors import ConfigError, ProtocolError, UserError
from rl_async.files import DAMAGE, UNDECODABLE, make_durable_folder, written_whole
from rl_async.messages import Explanation, Task, Trajectory

KEY = "rollout.replay"
# In the name of an evaluation's file that lacks episodes.
PARTIAL = "partial"
# In place of the suffix of a file of trajectories.
IMAGES = ".images.zip"
NO_MEDIA: Mapping[str, bytes] = {}


class TrainedRow(msgspec.Struct, frozen=True):
    """One trained row, one line of ``trained.jsonl``."""

    lineage: int
    step: int
    group: int
    sample: int
    segment: int = 0
    tokens_hash: str = ""
    # Replaces ``tokens_hash`` in files of older versions.
    tokens_sha256: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def digest(self) -> str:
        """The hash of the row's tokens, of the kind that the ledger of its time has."""
        return self.tokens_hash or self.tokens_sha256 or ""


def write_trajectories(
    path: Path,
    rows: Sequence[Trajectory],
    explanations: Sequence[Explanation] | None = None,
    media: Mapping[str, bytes] = NO_MEDIA,
) -> None:
    """Write rows as compressed JSON lines, atomically and durably. Floats keep every bit.

    ``explanations``, one per row, are added as ``correction``, which readers of trajectories skip. The images in
    ``media``, bytes by SHA-256, go into a ZIP file beside it (``images_file``).
    Read them with ``import gzip, json`` and ``rows = [json.loads(line) for line in gzip.open(path, "rt")]``.
    """
    make_durable_folder(path.parent)
    if media:
        with written_whole(images_file(path), durable=True) as temporary, zipfile.ZipFile(temporary, "w") as images:
            for name, data in media.items():
                images.writestr(zipfile.ZipInfo(name), data)
    with written_whole(path, durable=True) as temporary, gzip.open(temporary, "wb", compresslevel=1) as file:
        for number, row in enumerate(rows):
            # Routed experts would be hundreds of numbers per token.
            line = msgspec.structs.asdict(row) | {"routed_experts": None}
            if explanations is not None:
                line["correction"] = explanations[number]
            file.write(msgspec.json.encode(line, enc_hook=_array_to_list) + b"\n")


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read the rows of a file that ``write_trajectories`` wrote, without the explanations."""
    with gzip.open(path, "rb") as file:
        rows = [msgspec.json.decode(line, type=Trajectory, dec_hook=_list_to_array) for line in file]
    for row in rows:
        row.token_ids = row.token_ids.astype(np.int32)
        row.loss_mask = row.loss_mask.astype(bool)
        row.logprobs = row.logprobs.astype(np.float32)
        row.kept_tokens = None if row.kept_tokens is None else row.kept_tokens.astype(np.int32)
    return rows


def images_file(path: Path) -> Path:
    """Return where the images of the rows in ``path`` are, each once, under its SHA-256."""
    return path.with_name(path.name.removesuffix(".jsonl.gz") + IMAGES)


def read_images(path: Path, wanted: Iterable[str]) -> dict[str, bytes]:
    """Return those of the ``wanted`` images, by SHA-256, that were recorded of the rows in ``path``.

    Raises UserError for a damaged file.
    """
    file = images_file(path)
    if not file.is_file():
        return {}
    try:
        with zipfile.ZipFile(file) as images:
            return {name: images.read(name) for name in {*wanted} & {*images.namelist()}}
    except (zipfile.BadZipFile, *DAMAGE) as error:
        raise UserError(f"{file} is damaged: {error}") from error


def forget_file(path: Path) -> None:
    """Delete a file of trajectories and its images; another rank may have deleted them."""
    path.unlink(missing_ok=True)
    images_file(path).unlink(missing_ok=True)


def trained_file(run: Path, step: int, lineage: int, rank: int) -> Path:
    """Return where a rank writes what it trained in a step."""
    return run / "trajectories" / f"step-{step:06d}-lineage{lineage}-rank{rank}.jsonl.gz"


def forget_trained(run: Path, until: int) -> None:
    """Delete what was recorded of the training of steps before ``until``, by any rank in any lineage."""
    for path in (run / "trajectories").glob("step-*.jsonl.gz"):
        if _step(path) < until:
            forget_file(path)


def files_of_step(folder: Path, step: int) -> list[Path]:
    """Return the files of a step that its newest lineage wrote, one for each rank; none if it was not recorded."""
    paths = list(folder.glob(f"step-{step:06d}-*.jsonl.gz"))
    newest = max(map(_lineage, paths), default=0)
    return sorted(path for path in paths if _lineage(path) == newest)


def evaluation_file(run: Path, step: int, *, whole: bool = True) -> Path:
    """Return where the evaluation of a version is written; one that ended before it was ``whole`` has another name."""
    return run / "trajectories" / f"eval-{step:06d}{'' if whole else f'-{PARTIAL}'}.jsonl.gz"


def is_whole(file: Path) -> bool:
    """Whether the file of an evaluation has all episodes."""
    return not file.name.endswith(f"-{PARTIAL}.jsonl.gz")


def evaluations(folder: Path) -> dict[int, Path]:
    """Return the files of evaluations, partial ones too, by the step of the version that was evaluated, in order."""
    files = {int(path.name.split("-")[1].partition(".")[0]): path for path in folder.glob("eval-*.jsonl.gz")}
    return dict(sorted(files.items()))


class RecordedGroup(NamedTuple):
    """A group that a step trained, by its numbers in the run that recorded it, with the tokens that it had.

    ``tokens`` are hashes by sample and segment.
    """

    step: int
    group: int
    lineage: int
    tokens: Mapping[tuple[int, int], str]

    @property
    def samples(self) -> set[int]:
        """The numbers of its samples."""
        return {sample for sample, _ in self.tokens}


class Recording:
    """The groups that the run in ``folder`` trained. Every method raises ConfigError if a step cannot be replayed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._cached: tuple[int, dict[int, dict[int, list[Trajectory]]]] = (-1, {})
        # The images of the step that was read last, by SHA-256.
        self.images: dict[str, bytes] = {}

    @cached_property
    def groups(self) -> list[RecordedGroup]:
        """The groups in the order of training.

        A lineage voids what older ones trained from its first step on, even where it has not come as far itself.
        """
        path = self.folder / "trained.jsonl"
        if not path.is_file():
            raise ConfigError(f"{KEY}={self.folder}: it has no trained.jsonl; give the folder of a run that trained")
        steps: dict[int, list[TrainedRow]] = {}
        newest = 0
        for row in _trained_rows(path):
            if row.lineage > newest:
                newest = row.lineage
                steps = {step: rows for step, rows in steps.items() if step < row.step}
            if row.lineage == newest:
                steps.setdefault(row.step, []).append(row)
        return [group for step in sorted(steps) for group in _grouped(step, steps[step])]

    @cached_property
    def _by_number(self) -> dict[tuple[int, int], RecordedGroup]:
        return {(group.step, group.group): group for group in self.groups}

    def rows(self, step: int, group: int) -> dict[int, list[Trajectory]]:
        """Return a group's rows by sample, in order of their segments: those that ``trained.jsonl`` names."""
        trained = self._by_number.get((step, group))
        if trained is None:
            raise ConfigError(f"{KEY}={self.folder}: it did not train group {group} in step {step}")
        if self._cached[0] != step:
            self._cached = step, self._read(step, trained.lineage)
        found = self._cached[1].get(group, {})
        keyed = {(row.sample, row.segment): row for rows in found.values() for row in rows}
        tokens = {key: _hash(row, trained.tokens.get(key, "")) for key, row in keyed.items()}
        if tokens != trained.tokens:
            differs = sorted(
                key for key in tokens.keys() | trained.tokens if tokens.get(key) != trained.tokens.get(key)
            )
            raise ConfigError(
                f"{KEY}={self.folder}: trajectories/ and trained.jsonl disagree on step {step}, group {group}, "
                f"(sample, segment) {', '.join(map(str, differs[:8]))}; only what is there as it was trained is "
                "trained again"
            )
        return found

    def _read(self, step: int, lineage: int) -> dict[int, dict[int, list[Trajectory]]]:
        groups: dict[int, dict[int, list[Trajectory]]] = {}
        self.images = {}
        paths = sorted((self.folder / "trajectories").glob(f"step-{step:06d}-lineage{lineage}-*.jsonl.gz"))
        if not paths:
            raise ConfigError(
                f"{KEY}={self.folder}: it has no trajectories of step {step}; a run with trainer.keep_trajectories "
                "deletes the oldest"
            )
        for path in paths:
            try:
                rows = read_trajectories(path)
            except (OSError, *DAMAGE) as error:
                raise ConfigError(f"{KEY}={self.folder}: {path.name} cannot be read: {error}") from error
            shown = {medium.sha256 for row in rows for medium in row.media}
            self.images |= (images := read_images(path, shown))
            if images.keys() != shown:
                raise ConfigError(f"{KEY}={self.folder}: images of its episodes were not recorded (step {step})")
            for row in rows:
                groups.setdefault(row.group_id, {}).setdefault(row.sample, []).append(row)
        for samples in groups.values():
            for rows in samples.values():
                rows.sort(key=lambda row: row.segment)
        return groups


def _hash(row: Trajectory, recorded: str) -> str:
    """Return the hash of a row's tokens, of the kind that was recorded: older versions recorded SHA-256."""
    older = len(recorded) == 2 * hashlib.sha256().digest_size
    return hashlib.sha256(row.token_ids.tobytes()).hexdigest() if older else row.tokens_hash()


def task_of(group: RecordedGroup) -> Task:
    """Return what the queue admits for a recorded group: nothing but its place."""
    place = {"step": group.step, "group": group.group}
    return Task(
        task_id=f"recorded:{group.step}.{group.group}", data_source=KEY, prompt=[], ground_truth="", extra=place
    )


def place_of(task: Task) -> tuple[int, int]:
    """Return step and group of a task that ``task_of`` made."""
    return task.extra["step"], task.extra["group"]


def _grouped(step: int, rows: Iterable[TrainedRow]) -> list[RecordedGroup]:
    tokens: dict[int, dict[tuple[int, int], str]] = {}
    lineage = 0
    for row in rows:
        lineage = row.lineage
        tokens.setdefault(row.group, {})[row.sample, row.segment] = row.tokens_sha256 or row.tokens_hash
    return [RecordedGroup(step, group, lineage, tokens[group]) for group in sorted(tokens)]


def _trained_rows(path: Path) -> Iterator[TrainedRow]:
    # A kill may have torn the last line.
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            yield msgspec.json.decode(line, type=TrainedRow)
        except UNDECODABLE as error:
            raise ConfigError(f"{KEY}: {path}:{number}: {error}") from error


def _step(path: Path) -> int:
    """Parse the step of ``step-000012-lineage0-rank0.jsonl.gz``."""
    return int(path.name.split("-")[1])


def _lineage(path: Path) -> int:
    """Parse the number behind ``lineage`` in ``step-000012-lineage0-rank0.jsonl.gz``."""
    for part in path.name.removesuffix(".jsonl.gz").split("-"):
        if part.startswith("lineage"):
            return int(part.removeprefix("lineage"))
    raise ProtocolError(f"{path} does not name its lineage")


def _array_to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _list_to_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        # The caller narrows it to int32, bool or float32, and this type holds their values exactly.
        return np.asarray(value, dtype=np.float64)
    raise NotImplementedError(f"cannot decode {kind}")
