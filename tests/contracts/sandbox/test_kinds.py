"""Which sandbox a config names, and whether one can be made here."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rl_async.configs.schema.reward import RewardConfig, RewardTerm, SandboxConfig
from rl_async.errors import ConfigError
from rl_async.reward_loop.service import RewardService
from rl_async.sandbox.bubblewrap import CHECKS, INSTALL
from rl_async.sandbox.kinds import make_sandbox
from tests.contracts.sandbox.conftest import SETTINGS, settings_of
from tests.unit.reward_loop.rows import score as score_by
from tests.unit.reward_loop.rows import task

PROVIDER = """
import asyncio, tempfile
from rl_async.sandbox.api import Result, SandboxLost

class Here:
    def __init__(self, config):
        self.config = config

    async def open(self):
        return Folder(self.config.timeout_s)

class Folder:  # that the tests of the scorer need: no put, get, snapshot and restore
    def __init__(self, seconds):
        self.seconds, self.folder = seconds, tempfile.TemporaryDirectory()

    async def run(self, language, code, *, stdin=b"", seconds=None):
        command = {"python": "python3", "bash": "bash"}[language]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(command, "-c", code, cwd=self.folder.name, **pipes)
        async with asyncio.timeout(min(seconds or self.seconds, self.seconds)):
            out, err = await process.communicate(stdin)
        return Result(out, err, process.returncode, "", 0.0)

    async def close(self):
        self.folder.cleanup()
"""


async def test_a_users_own_runs_what_the_scorer_asks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROVIDER)
    settings = replace(SETTINGS, kind=f"{tmp_path}/mine.py:Here")
    config = RewardConfig(functions=(RewardTerm(name="code"),))
    async with RewardService(config, sandbox=settings) as service:
        answer = "```python\ndef add(a, b):\n    return a + b\n```"
        scored = await score_by(service, answer, task("assert add(1, 2) == 3\nassert add(3, 4) == 8\n"))
    assert (scored.reward, scored.reward_parts["code/tests"]) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "bubble"}, r"sandbox\.kind.*bubblewrap, container, sandbox_fusion"),
        ({"kind": "nowhere.py:Mine"}, r"sandbox\.kind.*nowhere\.py"),
        ({"kind": "container", "image": "x", "command": ("no-such-docker",)}, r"sandbox\.command.*no-such-docker"),
        ({"kind": "container", "image": "x", "command": ("false",)}, r"sandbox\.kind.*exit code 1.*false pull x"),
    ],
)
def test_what_cannot_be_made_names_the_key(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_sandbox(SandboxConfig(**given))


def test_an_image_that_is_not_here_is_not_looked_for_elsewhere() -> None:
    settings = replace(settings_of("container"), image="localhost/no-such-image:1")
    with pytest.raises(ConfigError, match=r"sandbox\.kind.*no-such-image"):
        make_sandbox(settings)


async def test_names_at_the_root_lead_into_the_workspace() -> None:
    workspace = await make_sandbox(settings_of("bubblewrap")).open(top=("app", "logs"))
    await workspace.put("app/a", b"1")
    result = await workspace.run("bash", "cat /app/a; mkdir logs; echo 2 > /logs/b; rm /app; mkdir /other")
    assert result.stdout == b"1" and result.exit != 0 and result.stderr.count(b"Read-only file system") == 2
    assert await workspace.get("logs/b") == b"2\n"
    await workspace.close()


async def test_an_image_has_no_further_names_at_its_root() -> None:
    sandbox = make_sandbox(SandboxConfig(kind="container", image="x", command=("true",)))
    with pytest.raises(ConfigError, match=r"sandbox\.kind.*/app"):
        await sandbox.open(top=("app",))


BWRAP = shutil.which("bwrap")
needs_check = pytest.mark.skipif(BWRAP is None, reason=f"bwrap is not here; {INSTALL} installs it")


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


@needs_check
def test_one_that_was_killed_says_nothing(folder: Path) -> None:
    write(
        folder,
        f'echo tried >> {folder}/tries; [ "$(wc -l < {folder}/tries)" -ge {CHECKS} ] || kill -9 $$',
        f'exec {BWRAP} "$@"',
    )
    make_sandbox(SETTINGS)
    assert len((folder / "tries").read_text().split()) == CHECKS


@needs_check
def test_one_that_is_killed_every_time_is_a_config_error(folder: Path) -> None:
    write(folder, f"echo tried >> {folder}/tries; kill -9 $$")
    with pytest.raises(ConfigError, match=r"sandbox\.kind"):
        make_sandbox(SETTINGS)
    assert len((folder / "tries").read_text().split()) == CHECKS


@needs_check
def test_a_refusal_is_not_tried_again(folder: Path) -> None:
    write(folder, f"echo tried >> {folder}/tries; exit 1")
    with pytest.raises(ConfigError, match=r"sandbox\.kind"):
        make_sandbox(SETTINGS)
    assert len((folder / "tries").read_text().split()) == 1
