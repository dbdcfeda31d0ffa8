"""Sandboxes with small limits; their tests are skipped where there is no bwrap, or nothing that runs containers."""

import os
import shlex
import shutil
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.sandbox import Sandbox, Workspace
from rl_async.sandbox.bubblewrap import INSTALL
from rl_async.sandbox.kinds import make_sandbox

MEMORY_BYTES = 256 << 20
SETTINGS = SandboxConfig(
    timeout_s=60.0,  # the machine may be slow; tests of this limit shorten it
    cpu_s=60,
    memory_bytes=MEMORY_BYTES,
    workspace_bytes=4 << 20,
    processes=24,
    output_bytes=100_000,
)
COMMAND, IMAGE = "RL_ASYNC_CONTAINER_COMMAND", "RL_ASYNC_CONTAINER_IMAGE"
HOW = f"{COMMAND} names no docker or podman with its options; {IMAGE} is localhost/sandbox, made by image.py"


def settings_of(kind: str) -> SandboxConfig:
    """Return the settings of a kind, or skip the test where it cannot work."""
    if kind == "bubblewrap":
        if shutil.which("bwrap") is None:
            pytest.skip(f"bwrap is not here; {INSTALL} installs it")
        return SETTINGS
    if COMMAND not in os.environ:
        pytest.skip(HOW)
    image = os.environ.get(IMAGE, "localhost/sandbox")
    return replace(SETTINGS, kind=kind, command=tuple(shlex.split(os.environ[COMMAND])), image=image)


@pytest.fixture(scope="session", params=["bubblewrap", "container"])
def settings(request: pytest.FixtureRequest) -> SandboxConfig:
    return settings_of(request.param)


@pytest.fixture(scope="session")
def sandbox(settings: SandboxConfig) -> Sandbox:
    return make_sandbox(settings)


@pytest.fixture
async def workspace(sandbox: Sandbox) -> AsyncIterator[Workspace]:
    opened = await sandbox.open()
    yield opened
    await opened.close()
