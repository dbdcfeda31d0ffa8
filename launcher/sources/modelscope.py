"""Models and data sets of ModelScope, through its own client and cache. Nothing of a repository is executed.

A fetched folder is ``models/OWNER--NAME/snapshots/REVISION`` in that cache (``MODELSCOPE_CACHE``). The client knows no
commit of a branch: what a branch holds is fetched again when it has changed, into the same folder.
"""

from importlib.util import find_spec
from pathlib import Path

from rl_async.errors import ConfigError
from rl_async.launcher.sources.hub import HubId, Kind, file_patterns

INSTALL = "python -m pip install 'rl-async[modelscope]'"
BRANCH = "master"  # what the client takes where no revision is named


def installed() -> bool:
    """Whether ModelScope's client is here."""
    return find_spec("modelscope_hub") is not None


def snapshot(kind: Kind, wanted: HubId, key: str) -> Path:
    """Fetch a repository, as far as the cache has not its files; return its folder.

    What the cache has is taken if the site cannot be reached. Raises ConfigError, naming ``key``.
    """
    if not installed():
        raise ConfigError(f"{key}: modelscope:{wanted.repo} needs ModelScope's client; run `{INSTALL}`")
    from modelscope_hub import AuthenticationError, HubApi, HubConfig, NotExistError, PermissionDeniedError
    from modelscope_hub.errors import CacheNotFound, HubError
    from requests import RequestException

    config = HubConfig()
    api, site, revision = HubApi(config=config), config.endpoint, wanted.revision or BRANCH
    try:
        folder: Path = api.download_repo(
            wanted.repo,
            kind,
            revision=revision,
            allow_patterns=file_patterns(kind, wanted),
            ignore_patterns=["*/*"] if kind == "model" else None,
        )
    except (AuthenticationError, NotExistError, PermissionDeniedError) as error:
        raise ConfigError(
            f"{key}: {site} has no {kind} {wanted.repo} with a revision {revision} that you may read; correct it, or "
            "`modelscope login` if it is private"
        ) from error
    except (HubError, RequestException, OSError) as error:
        try:
            folder = api.download_repo(wanted.repo, kind, revision=revision, local_files_only=True)
        except CacheNotFound:
            why = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"{key}: {site} cannot be reached for the {kind} {wanted.repo} ({why}); give a folder or file, or "
                f"fetch it where there is a network (`modelscope download {wanted.repo}`) and copy that cache to this "
                "machine's MODELSCOPE_CACHE"
            ) from error
    return folder
