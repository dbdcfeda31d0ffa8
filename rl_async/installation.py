"""Which rl-async this is: its version, the commit that it was made from, and how to install the same one elsewhere.

pip and uv record where a distribution came from in ``direct_url.json`` (PEP 610).
"""

import json
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "rl-async"
# Dependencies of the code that runs inside an engine's process which the engine's own distribution may not bring.
BESIDE_ENGINES = ("xxhash",)


def version() -> str:
    """Return the version, as pyproject.toml had it at the installation; empty if rl-async is not installed."""
    installed = _distribution()
    return installed.version if installed else ""


def commit() -> str:
    """Return the commit, with ``+changes`` for a checkout that differs from it; empty if it is unknown.

    It is known for an installation from a repository's address, and for an editable one of a checkout.
    """
    source = _source()
    if vcs := source.get("vcs_info"):
        return str(vcs["commit_id"])
    folder = _local(source)
    if folder is None or not source.get("dir_info", {}).get("editable") or not (folder / ".git").exists():
        return ""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    # There may be no git here, or one that refuses this folder.
    except (OSError, subprocess.SubprocessError):
        return ""


def install_beside(python: str, *more: str) -> str:
    """Return the command that installs this rl-async in that Python without its dependencies, but with ``more``."""
    return shlex.join([python, "-m", "pip", "install", "--no-deps", *_pip_arguments(), *more])


def _pip_arguments() -> list[str]:
    """Return what to give ``pip install`` for the same rl-async as this one."""
    source = _source()
    if vcs := source.get("vcs_info"):
        return [f"{DISTRIBUTION} @ {vcs['vcs']}+{source['url']}@{vcs['commit_id']}"]
    folder = _local(source)
    if folder is not None and folder.exists():
        return ["--editable", str(folder)] if source.get("dir_info", {}).get("editable") else [str(folder)]
    if "archive_info" in source and folder is None:
        return [f"{DISTRIBUTION} @ {source['url']}"]
    return [f"{DISTRIBUTION}=={version()}" if version() else DISTRIBUTION]


def _distribution() -> metadata.Distribution | None:
    """Return the metadata of the installation, and not those that a build left in the checkout, which may be old."""
    found = metadata.distributions(name=DISTRIBUTION)
    return next((one for one in found if one.read_text("METADATA") is not None), None)


def _source() -> dict[str, Any]:
    """Return ``direct_url.json``; empty if rl-async came from a package index, or is not installed."""
    installed = _distribution()
    text = installed.read_text("direct_url.json") if installed else None
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def _local(source: dict[str, Any]) -> Path | None:
    """Return the folder or file on this machine that rl-async was installed from; None if it came from elsewhere."""
    url = urlsplit(source.get("url", ""))
    return Path(unquote(url.path)) if url.scheme == "file" else None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
