"""Models and data sets of the Hugging Face Hub, through its own client and cache. Nothing of a repository is executed.

A fetched folder is ``models--OWNER--NAME/snapshots/COMMIT`` in that cache, so the config of a run, which names it, says
which commit the run was trained with.
"""

import re
from pathlib import Path
from typing import Literal, NamedTuple

from rl_async.errors import ConfigError

Kind = Literal["model", "dataset"]

MODELSCOPE = "modelscope:"
_ID = re.compile(
    rf"(?P<site>{MODELSCOPE})?"
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<part>[\w./-]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"(?P<kind>model|dataset)s--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")
# Weights as safetensors alone: the other formats of the Hub are pickles, which run code when they are read.
FILES: dict[Kind, list[str]] = {
    "model": ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"],
    "dataset": ["*.parquet", "*.jsonl"],
}
_NOT_IDS = (".parquet", ".jsonl", ".json", ".yaml", ".gguf", ".safetensors")


class HubId(NamedTuple):
    """``OWNER/NAME[@REVISION][:PART]``, after ``modelscope:`` if it is of that site.

    The part is the split of a data set, with its configuration before a slash.
    """

    repo: str
    revision: str | None = None
    part: str | None = None
    modelscope: bool = False


def hub_id(text: str) -> HubId | None:
    """Read what may be an id of the Hub, or of ModelScope; None if it can only be a path."""
    found = _ID.fullmatch(text)
    if found is None or text.endswith(_NOT_IDS):
        return None
    return HubId(found["repo"], found["revision"], found["part"], found["site"] is not None)


def file_patterns(kind: Kind, wanted: HubId) -> list[str]:
    """Return which files of a repository are fetched."""
    return [f"*{wanted.part or ''}*{name}" for name in FILES[kind]] if kind == "dataset" else FILES[kind]


def snapshot(kind: Kind, wanted: HubId, key: str) -> Path:
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
            # Files of subfolders, and Mistral's second copy of the weights.
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
