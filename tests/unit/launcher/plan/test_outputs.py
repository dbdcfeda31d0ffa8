"""Trackers must be installed and logged in to, and the disk must have room, before a run starts."""

import sys
from pathlib import Path

import pytest

from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, UserError
from rl_async.launcher.plan.memory import ModelSize
from rl_async.launcher.plan.outputs import SAVED_BYTES, check_disk, check_logins, check_trackers, checkpoint_bytes


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory and home without logins, and no packages but those in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SWANLAB_API_KEY", "SWANLAB_ROOT", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])


def config(*overrides: str) -> RunConfig:
    return load_config("calculator", list(overrides))


def test_a_tracker_is_a_package_and_not_the_folder_of_its_runs() -> None:
    online = config("tracking.backends=[console,jsonl,wandb]")
    with pytest.raises(UserError, match=r"^tracking\.backends: .*wandb"):
        check_trackers(online)
    Path("wandb").mkdir()
    with pytest.raises(UserError, match=r"^tracking\.backends: .*wandb"):
        check_trackers(online)
    Path("wandb/__init__.py").touch()
    check_trackers(online)


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_only_a_tracker_that_goes_online_needs_a_login(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = f"tracking.backends=[console,{name}]"
    check_logins(config(backends))
    check_logins(config("tracking.offline=false", "tracking.backends=[console]"))
    with pytest.raises(ConfigError, match=rf"^tracking\.offline=false: {name}"):
        check_logins(config(backends, "tracking.offline=false"))
    monkeypatch.setenv(f"{name.upper()}_API_KEY", "secret")
    check_logins(config(backends, "tracking.offline=false"))


def test_the_logins_that_the_trackers_keep_in_files_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = config("tracking.backends=[wandb]", "tracking.offline=false")
    Path(".netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_logins(wandb)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8443")
    with pytest.raises(ConfigError, match="wandb"):
        check_logins(wandb)
    Path("mine").write_text("machine wandb.example.org login user password secret\n")
    monkeypatch.setenv("NETRC", "mine")
    check_logins(wandb)
    monkeypatch.delenv("WANDB_BASE_URL")
    with pytest.raises(ConfigError, match="wandb"):
        check_logins(wandb)
    Path(".config/wandb").mkdir(parents=True)
    Path(".config/wandb/settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    check_logins(wandb)
    Path(".swanlab").mkdir()
    Path(".swanlab/.netrc").touch()
    check_logins(config("tracking.backends=[swanlab]", "tracking.offline=false"))


@pytest.mark.parametrize(
    ("steps", "every", "keep", "there", "count"),
    [(50, 10, 2, 0, 3), (50, 10, 2, 2, 1), (50, 10, 2, 3, 1), (50, 0, 2, 0, 1), (11, 10, 5, 0, 2), (5, 10, 5, 0, 1)],
)
def test_checkpoints_that_are_kept_at_once_are_counted(
    steps: int, every: int, keep: int, there: int, count: int, tmp_path: Path
) -> None:
    for step in range(there):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").touch()
    own = config(f"trainer.steps={steps}", f"trainer.checkpoint_every={every}", f"trainer.keep_checkpoints={keep}")
    size = ModelSize(parameters=100, kv_per_token=1, critic=10)
    assert checkpoint_bytes(own, tmp_path, size) == count * 110 * SAVED_BYTES
    assert checkpoint_bytes(own, tmp_path, None) == 0
    assert checkpoint_bytes(config("trainer.lora={}"), tmp_path, size) == 0


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    check_disk(config(), tmp_path / "runs" / "a", ModelSize(parameters=1, kv_per_token=1))
    with pytest.raises(UserError, match=r"^launcher\.run_dir: "):
        check_disk(config(), tmp_path / "runs" / "a", ModelSize(parameters=1 << 60, kv_per_token=1))
