"""Checks the places that a run writes to before it starts: the disk with its checkpoints, and its trackers.

Reaches no network and imports no tracker: it only looks whether the package and the credentials are there.
"""

import configparser
import netrc
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rl_async.configs.schema.run import RunConfig, TrackerName
from rl_async.errors import ConfigError, UserError
from rl_async.launcher.plan.artifacts import checkpoints
from rl_async.launcher.plan.memory import ModelSize, gib

# A float32 weight and AdamW's two moments of it, in bytes. Checkpoints may hold the weights twice.
SAVED_BYTES = 12


def check_trackers(config: RunConfig) -> None:
    """Raise UserError unless the packages of the configured trackers are installed."""
    for name in config.tracking.backends:
        if name in ("jsonl", "console"):
            continue
        found = find_spec(name)
        # A folder of this name in the working directory, such as wandb makes, is found as a package without a file.
        if found is None or found.origin is None:
            raise UserError(
                f"tracking.backends: {sys.executable} has no {name}; install it with `pip install 'rl-async[{name}]'`"
            )


def check_logins(config: RunConfig) -> None:
    """Raise ConfigError for a tracker that is to be online and has no credentials here. Reaches no network."""
    for name in config.tracking.backends:
        if name in _LOGINS and not config.tracking.offline and not _LOGINS[name]():
            raise ConfigError(
                f"tracking.offline=false: {name} has no credentials here; run `{name} login`, or set "
                f"{name.upper()}_API_KEY"
            )


def check_disk(config: RunConfig, folder: Path, size: ModelSize | None) -> None:
    """Raise UserError if the disk of the run's folder has too little room for the checkpoints that are kept at once."""
    needed = checkpoint_bytes(config, folder, size)
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"launcher.run_dir: {place.absolute()} has {gib(free)} free, and the checkpoints that trainer."
            f"keep_checkpoints={config.trainer.keep_checkpoints} keeps need at least {gib(needed)}; free some of the "
            "disk, name a folder on another, or keep fewer"
        )


def checkpoint_bytes(config: RunConfig, folder: Path, size: ModelSize | None) -> int:
    """Return what the checkpoints that are not yet in ``folder`` take at least, in bytes; 0 if it is unknown.

    An older checkpoint is deleted after a newer one is complete. With LoRA only the small adapters are saved.
    """
    trainer = config.trainer
    if size is None or trainer.lora is not None:
        return 0
    scheduled = -(-trainer.steps // trainer.checkpoint_every) if trainer.checkpoint_every else 1
    at_once = min(trainer.keep_checkpoints + 1, scheduled)
    return max(1, at_once - len(checkpoints(folder))) * (size.parameters + size.critic) * SAVED_BYTES


def _wandb_has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(_wandb_address()).hostname
    named = os.environ.get("NETRC")
    files = [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return any(_names(file, host) for file in files if file.is_file())


def _wandb_address() -> str:
    """Return the address of the W&B server: the environment's, that of the settings, or the public one."""
    if given := os.environ.get("WANDB_BASE_URL"):
        return given
    settings = configparser.ConfigParser()
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    settings.read([Path(folder) / "settings", Path("wandb") / "settings"], encoding="utf-8")
    return settings.get("default", "base_url", fallback="https://api.wandb.ai")


def _names(file: Path, host: str | None) -> bool:
    """Whether a netrc file has a login for the host. A file that cannot be read is left to the tracker to report."""
    try:
        return host is None or netrc.netrc(str(file)).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return True


def _swanlab_has_login() -> bool:
    root = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR")
    folders = [Path(".swanlab"), Path(root) if root else Path.home() / ".swanlab"]
    return bool(os.environ.get("SWANLAB_API_KEY")) or any((folder / ".netrc").is_file() for folder in folders)


_LOGINS: dict[TrackerName, Callable[[], bool]] = {"wandb": _wandb_has_login, "swanlab": _swanlab_has_login}
