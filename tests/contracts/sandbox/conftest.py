"""Sandboxes with small limits; their tests are skipped where there is no bwrap."""

import shutil
from collections.abc import AsyncIterator

import pytest

from rl_async.configs.schema.sandbox import SandboxConfig
from rl_async.sandbox.api import Sandbox, Workspace
from rl_async.sandbox.bubblewrap import INSTALL
from rl_async.sandbox.registry import make_sandbox

MEMORY_BYTES = 256 << 20
SETTINGS = SandboxConfig(
    timeout_s=60.0,  # the machine may be slow; tests of this limit shorten it
    cpu_s=60,
    memory_bytes=MEMORY_BYTES,
    workspace_bytes=4 << 20,
    processes=24,
    output_bytes=100_000,
)


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    if shutil.which("bwrap") is None:
        pytest.skip(f"bwrap is not here; {INSTALL} installs it")
    return make_sandbox(SETTINGS)


@pytest.fixture
async def workspace(sandbox: Sandbox) -> AsyncIterator[Workspace]:
    opened = await sandbox.open()
    yield opened
    await opened.close()
