"""Whether a sandbox can be made here, asked of a bwrap that is killed meanwhile or refuses."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_async.errors import ConfigError
from rl_async.sandbox.bubblewrap import CHECKS, INSTALL
from rl_async.sandbox.kinds import make_sandbox
from tests.contracts.sandbox.conftest import SETTINGS

BWRAP = shutil.which("bwrap")
pytestmark = pytest.mark.skipif(BWRAP is None, reason=f"bwrap is not here; {INSTALL} installs it")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The first folder on PATH, where anybody may write: started by root, bwrap is nobody's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        monkeypatch.setenv("PATH", name, prepend=":")
        yield Path(name)


def write(folder: Path, *lines: str) -> None:
    """Put a script in the place of bwrap."""
    script = folder / "bwrap"
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    script.chmod(0o755)


def test_one_that_was_killed_says_nothing(folder: Path) -> None:
    write(
        folder,
        f'echo tried >> {folder}/tries; [ "$(wc -l < {folder}/tries)" -ge {CHECKS} ] || kill -9 $$',
        f'exec {BWRAP} "$@"',
    )
    make_sandbox(SETTINGS)
    assert len((folder / "tries").read_text().split()) == CHECKS


def test_one_that_is_killed_every_time_is_a_config_error(folder: Path) -> None:
    write(folder, f"echo tried >> {folder}/tries; kill -9 $$")
    with pytest.raises(ConfigError, match=r"sandbox\.kind"):
        make_sandbox(SETTINGS)
    assert len((folder / "tries").read_text().split()) == CHECKS


def test_a_refusal_is_not_tried_again(folder: Path) -> None:
    write(folder, f"echo tried >> {folder}/tries; exit 1")
    with pytest.raises(ConfigError, match=r"sandbox\.kind"):
        make_sandbox(SETTINGS)
    assert len((folder / "tries").read_text().split()) == 1
