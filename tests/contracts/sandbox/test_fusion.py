"""Workspaces over Sandbox Fusion's HTTP API, against a server that speaks it and runs programs in a folder of its own.

The server's fields and the order of its steps are those of SandboxFusion's `sandbox/server/sandbox_api.py` and
`sandbox/runners/base.py`; it isolates nothing, and these programs are ours.
"""

import asyncio
import base64
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError
from rl_async.sandbox import SandboxLost, SandboxRefused, Workspace
from rl_async.sandbox.kinds import make_sandbox


class Server:
    """``answers``: what to answer instead of running a program, status and body, each once."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: list[tuple[int, dict[str, Any]]] = []

    async def run_code(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.answers:
            status, answer = self.answers.pop(0)
            return web.json_response(answer, status=status)
        return web.json_response(await asyncio.to_thread(self._run, body))

    def _run(self, body: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in body["files"].items():
                (Path(folder) / name).write_bytes(base64.b64decode(content))
            began = time.monotonic()
            done = subprocess.run(
                ["bash", "-c", body["code"]], cwd=folder, input=body["stdin"].encode(), capture_output=True, timeout=120
            )
            took = time.monotonic() - began
            files = [name for name in body["fetch_files"] if (Path(folder) / name).is_file()]
            fetched = {name: base64.b64encode((Path(folder) / name).read_bytes()).decode() for name in files}
        ran = {
            "status": "Finished",
            "execution_time": took,
            "return_code": done.returncode,
            "stdout": done.stdout.decode(),
            "stderr": done.stderr.decode(),
        }
        status = "Failed" if done.returncode else "Success"
        return {"status": status, "message": "", "compile_result": None, "run_result": ran, "files": fetched}


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, SandboxConfig]]:
    served = Server()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/run_code", served.run_code)
    async with TestServer(app) as running:
        url = str(running.make_url(""))
        yield (
            served,
            SandboxConfig(kind="sandbox_fusion", url=url, output_bytes=1000, timeout_s=60.0, workspace_bytes=1 << 20),
        )


@pytest.fixture
async def workspace(server: tuple[Server, SandboxConfig]) -> AsyncIterator[Workspace]:
    sandbox = await asyncio.to_thread(make_sandbox, server[1])
    opened = await sandbox.open()
    yield opened
    await opened.close()


async def test_programs_and_files(workspace: Workspace) -> None:
    await workspace.put("folder/given", b"5\n")
    result = await workspace.run("python", "print(open('folder/given').read() + input())", stdin=b"in")
    assert (result.stdout, result.exit, result.limit) == (b"5\nin\n", 0, "")
    result = await workspace.run("bash", "echo new > folder/new; ln -s /etc/passwd link; echo err >&2; exit 3")
    assert (result.stderr, result.exit) == (b"err\n", 3)
    assert await workspace.get("folder/new") == b"new\n"
    kept = await workspace.snapshot()
    await workspace.run("bash", "rm -r folder")
    for path in ("folder/new", "link", "../x", "/etc/passwd", "."):
        with pytest.raises(SandboxRefused):
            await workspace.get(path)
    await workspace.restore(kept)
    assert (await workspace.run("bash", "cat folder/*")).stdout == b"5\nnew\n"


async def test_limits(workspace: Workspace) -> None:
    result = await workspace.run("bash", "echo begun > log; sleep 1000", seconds=2)
    assert (result.exit, result.limit) == (-9, "seconds")
    assert await workspace.get("log") == b"begun\n"
    result = await workspace.run("bash", "yes | head -c 5000")
    assert (len(result.stdout), result.limit) == (1000, "output")
    assert (await workspace.run("bash", "head -c 9000000 /dev/zero > large")).exit != 0
    for path, data in (("large", bytes(2 << 20)), ("zero\0byte", b""), ("half\ud800", b"")):
        with pytest.raises(SandboxRefused):
            await workspace.put(path, data)


async def test_what_is_sent(server: tuple[Server, SandboxConfig], workspace: Workspace) -> None:
    await workspace.run("python", "print(1)")
    sent = server[0].requests[-1]
    assert (sent["language"], sent["memory_limit_MB"], sent["stdin"]) == ("bash", 1024, "")
    assert sent["run_timeout"] > 60 and len(sent["fetch_files"]) == 1


async def test_a_busy_server_is_asked_again_and_a_broken_one_is_lost(
    server: tuple[Server, SandboxConfig], workspace: Workspace
) -> None:
    server[0].answers = [(503, {}), (429, {})]
    assert (await workspace.run("bash", "echo 1")).stdout == b"1\n"
    error = {"status": "SandboxError", "message": "no", "run_result": {"status": "Error", "stderr": "no"}}
    for answer in ((200, error), (500, {}), (200, {"status": 1}), (200, {"status": "Success"})):
        server[0].answers = [answer]
        with pytest.raises(SandboxLost):
            await workspace.run("bash", "echo 1")
    await workspace.close()
    with pytest.raises(SandboxLost):
        await workspace.run("bash", "echo 1")


async def test_a_server_that_runs_nothing_is_refused_at_the_start(server: tuple[Server, SandboxConfig]) -> None:
    served, config = server
    served.answers = [(200, {"status": "SandboxError"}), (404, {})]
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"sandbox\.url"):
            await asyncio.to_thread(make_sandbox, config)
    with pytest.raises(ConfigError, match=r"sandbox\.url"):
        await asyncio.to_thread(make_sandbox, msgspec.structs.replace(config, url="http://127.0.0.1:1"))


async def test_its_root_has_no_further_names(server: tuple[Server, SandboxConfig]) -> None:
    sandbox = await asyncio.to_thread(make_sandbox, server[1])
    with pytest.raises(ConfigError, match=r"sandbox\.kind.*/app"):
        await sandbox.open(top=("app",))
