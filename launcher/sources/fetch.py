"""From the models and data sets that a config names to folders and files on this machine."""

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rl_async.configs.derived.data import GENERATED_PREFIX, files_of
from rl_async.configs.derived.models import warm_start_of
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError
from rl_async.launcher.sources import hub
from rl_async.launcher.sources.gguf import converted, folder_of
from rl_async.launcher.sources.hub import HubId, Kind

PACKAGE = "package:"
MODEL_KEYS = ("model.path", "algorithm.kl.reference_path", "critic.path", "reward.model.path")
SPLITS = {"data.path": "train", "data.eval_path": "test"}  # which an id without a part stands for

Snapshot = Callable[[Kind, HubId, str], Path]
Change = Callable[[str, Kind, str], str]  # key, kind, source


def fetch_sources(config: RunConfig, snapshot: Snapshot = hub.snapshot) -> RunConfig:
    """Return the config with folders and files of this machine in place of ids, GGUF files and packages.

    Raises ConfigError or DataError, naming the key, for what cannot be fetched or read. What is a path already, and is
    there or will be made, stays as it is.
    """

    def change(key: str, kind: Kind, source: str) -> str:
        if kind == "model":
            return source if key == "model.path" and warm_start_of(config) else str(model_folder(source, key, snapshot))
        return source if config.data.make else data_files(source, key, snapshot)

    return _changed(config, change)


def kept_sources(given: RunConfig, kept: RunConfig) -> RunConfig:
    """Return ``given`` with the folders of a run's own config where the same key names what these were fetched from."""
    had: dict[str, list[str]] = {}  # of each key; several for a list of data sets

    def note(key: str, kind: Kind, source: str) -> str:
        had.setdefault(key, []).append(source)
        return source

    _changed(kept, note)
    rest = {key: iter(paths) for key, paths in had.items()}

    def keep(key: str, kind: Kind, source: str) -> str:
        old = next(rest.get(key, iter(())), None)
        return source if old is None or not _came_from(old, source) else old

    return _changed(given, keep)


def model_folder(source: str, key: str, snapshot: Snapshot = hub.snapshot) -> Path:
    """Return the folder of a model: of a path, an id ``OWNER/NAME[@REVISION]``, a GGUF file, or ``package:NAME``.

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
        raise ConfigError(f"{key}: no package {name!r} is installed here, as Python imports it; `pip install` it first")
    files = sorted(file for place in found.submodule_search_locations or [] for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{key}: the package {name} has {len(files)} GGUF files, and one is needed; give a file")
    return files[0]


def data_files(source: str, key: str, snapshot: Snapshot = hub.snapshot) -> str:
    """Return a path or pattern of files for a data set: of a path, or of an id ``OWNER/NAME[@REVISION][:PART]``.

    ``PART`` selects files whose path contains it, such as a split (`test`) or a configuration and split (`main/test`).
    Raises ConfigError or DataError, naming ``key``.
    """
    if source.startswith(GENERATED_PREFIX) or any(file.exists() for file in files_of(source)):
        return source
    if cached := hub.cached_id(source):
        snapshot("dataset", cached[1]._replace(part=re.split(r"[-*.]", Path(source).name)[0]), key)
        return source
    wanted = hub.hub_id(source)
    if wanted is None:
        return source
    wanted = wanted._replace(part=wanted.part or SPLITS[key])
    return _one_split(snapshot("dataset", wanted, key), wanted, key)


def _one_split(folder: Path, wanted: HubId, key: str) -> str:
    """Return the file, or the pattern of the shards, of the only split in ``folder`` that the id's part selects."""
    assert wanted.part is not None
    splits: dict[str, str] = {}
    for file in sorted(file for pattern in hub.FILES["dataset"] for file in folder.rglob(pattern)):
        name = file.relative_to(folder).as_posix()
        if wanted.part in name:
            shards = re.sub(r"-\d+-of-\d+", "-*", name)
            splits[shards] = name if splits.get(shards, name) == name else shards
    if len(splits) == 1:
        return str(folder / next(iter(splits.values())))
    if not splits:
        raise DataError(f"{key}: {wanted.repo} has no Parquet or JSONL files named {wanted.part}; add :SPLIT to the id")
    named = ", ".join(sorted(splits))
    raise DataError(f"{key}: {wanted.repo}:{wanted.part} selects several data sets ({named}); add :PART to the id")


def _came_from(path: str, source: str) -> bool:
    """Whether a run's ``path`` is what ``source`` stands for."""
    if source.startswith(PACKAGE) or source.endswith(".gguf"):
        file = gguf_file(source, "model.path")
        return Path(path) == folder_of(file)
    return not Path(source).exists() and hub.came_from(path, source)


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
