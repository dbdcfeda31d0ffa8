"""Models and data sets of ModelScope, through its own client. Nothing of a repository is executed.

ModelScope names no commit of a branch, so what was fetched is kept by the checksum of its files: the folder
``rl-async/models/OWNER--NAME/CHECKSUM`` of the client's cache (``MODELSCOPE_CACHE``) holds just these files, in these
versions. ``REVISION:PART.json`` beside it, quoted, lists what was last fetched whole, for when the site cannot be
reached.
"""

import hashlib
import sys
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import msgspec

from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE, replace_file
from rl_async.launcher.sources.hub import HubId, Kind, file_patterns

INSTALL = "python -m pip install 'rl-async[modelscope]'"
BRANCH = "master"  # what the client takes where no revision is named


class Listed(msgspec.Struct, frozen=True, rename="pascal"):
    """A file as the site lists it, with the client's names."""

    path: str
    size: int
    sha256: str


def installed() -> bool:
    """Whether ModelScope's client is here."""
    return find_spec("modelscope_hub") is not None


def snapshot(kind: Kind, wanted: HubId, key: str) -> Path:
    """Fetch a repository, as far as the cache has not its files; return a folder of the wanted ones alone.

    If the site cannot be reached, what was last fetched whole is taken. Raises ConfigError, naming ``key``.
    """
    if not installed():
        raise ConfigError(f"{key}: modelscope:{wanted.repo} needs ModelScope's client; run `{INSTALL}`")
    from modelscope_hub import AuthenticationError, HubApi, HubConfig, NotExistError, PermissionDeniedError
    from modelscope_hub.errors import HubError, NetworkError
    from requests import ConnectionError, Timeout

    config = HubConfig()
    api, site, revision = HubApi(config=config), config.endpoint, wanted.revision or BRANCH
    root = config.cache_dir / "rl-async" / f"{kind}s" / wanted.repo.replace("/", "--")
    last = root / f"{quote(f'{revision}:{wanted.part}', safe='')}.json"
    try:
        files = _wanted(api.list_repo_files(wanted.repo, kind, revision=revision), kind, wanted, f"{key}: {site}")
        folder = _fetched(api, files, kind, wanted, root)
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
    """Return the files to fetch of those that the site lists, in order. Raises ConfigError, naming ``where``."""
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


def _fetched(api: Any, files: list[Listed], kind: Kind, wanted: HubId, root: Path) -> Path:
    """Return the folder of these files; the client checks the size and checksum of each, or raises."""
    folder = _folder(root, files)
    entries, revision = msgspec.to_builtins(files), wanted.revision or BRANCH
    api.download_repo(wanted.repo, kind, revision=revision, local_dir=folder, file_list=entries)
    return folder


def _kept(root: Path, last: Path) -> Path | None:
    """Return the folder that was last fetched whole; None if there is none, or not all of its files are there."""
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
