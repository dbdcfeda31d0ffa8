"""What any sandbox does for programs that behave."""

import asyncio
import base64
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from rl_async.configs.schema.reward import RewardConfig, RewardTerm, SandboxConfig
from rl_async.errors import ConfigError
from rl_async.reward_loop.service import RewardService
from rl_async.sandbox import Sandbox, SandboxLost, SandboxRefused, Workspace
from rl_async.sandbox.bubblewrap import CHECKS, INSTALL
from rl_async.sandbox.kinds import make_sandbox
from tests.contracts.sandbox.conftest import SETTINGS, settings_of
from tests.unit.reward_loop.outside import score as score_by
from tests.unit.reward_loop.outside import task


async def test_a_program_runs(workspace: Workspace) -> None:
    result = await workspace.run(
        "python", "import sys\nprint(input() + '!', file=sys.stderr)\nsys.exit(3)", stdin=b"hi"
    )
    assert (result.stdout, result.stderr, result.exit, result.limit) == (b"", b"hi!\n", 3, "")
    result = await workspace.run("bash", "cat | wc -c; kill -TERM $$", stdin=b"x" * 300_000)
    assert (result.stdout.strip(), result.exit, result.limit) == (b"300000", -15, "")


async def test_input_that_is_not_read_is_dropped(workspace: Workspace) -> None:
    result = await workspace.run("python", "print('done')", stdin=b"x" * 3_000_000)
    assert (result.stdout, result.exit) == (b"done\n", 0)


async def test_files_stay_and_processes_do_not(workspace: Workspace) -> None:
    await workspace.put("folder/helper.py", b"value = 5")
    result = await workspace.run("bash", "sleep 1000 & cd folder && python3 -c 'import helper; print(helper.value)'")
    assert result.stdout == b"5\n"
    result = await workspace.run("bash", "set -- /proc/[0-9]*; echo $#; echo new > folder/new")
    assert result.stdout == b"2\n"  # process 1 and bash
    assert await workspace.get("folder/new") == b"new\n"


async def test_a_path_that_is_none_is_refused_and_the_workspace_lives(workspace: Workspace) -> None:
    with pytest.raises(SandboxRefused):
        await workspace.put("zero\0byte", b"")
    with pytest.raises(SandboxRefused):
        await workspace.get("zero\0byte")
    assert (await workspace.run("bash", "ls")).exit == 0


async def test_packages_of_this_python_can_be_imported(workspace: Workspace) -> None:
    result = await workspace.run("python", "import json, sqlite3, ssl, ctypes, decimal; print(json.dumps([1]))")
    assert (result.stdout, result.stderr) == (b"[1]\n", b"")


async def test_workspaces_share_nothing(sandbox: Sandbox, workspace: Workspace) -> None:
    await workspace.put("mine", b"1")
    other = await sandbox.open()
    assert (await other.run("bash", "ls")).stdout == b""
    await other.close()


async def test_a_snapshot_comes_back_here_and_elsewhere(sandbox: Sandbox, workspace: Workspace) -> None:
    await workspace.run("bash", "mkdir -p d .tmp && echo 1 > d/a && ln -s a d/link && chmod 700 d/a && echo t > .tmp/t")
    kept = await workspace.snapshot()
    await workspace.run("bash", "rm -rf d; echo 2 > b")
    other = await sandbox.open()
    for each in (workspace, other):
        await each.restore(kept)
        result = await each.run("bash", "find . -name '[abdlt]*' | sort; cat d/link; test -x d/a && cat .tmp/t")
        assert result.stdout.split() == [b"./.tmp/t", b"./d", b"./d/a", b"./d/link", b"1", b"t"]
    await other.close()


async def test_a_cancelled_program_is_ended_and_its_workspace_lives(workspace: Workspace) -> None:
    for wait_s in (0.0, 0.3):
        running = asyncio.create_task(workspace.run("bash", "echo begun >> log; sleep 1000"))
        await asyncio.sleep(wait_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await workspace.run("bash", "set -- /proc/[0-9]*; echo $#")).stdout == b"2\n"


async def test_programs_run_one_at_a_time(workspace: Workspace) -> None:
    code = "mkdir lock && sleep 0.2 && rmdir lock && echo -n alone"
    results = await asyncio.gather(*(workspace.run("bash", code) for _ in range(4)))
    assert [result.stdout for result in results] == [b"alone"] * 4


async def test_what_cannot_be_done_is_refused(workspace: Workspace) -> None:
    await workspace.run("bash", "mkdir folder; mkfifo pipe")
    for refused in (
        workspace.get("missing"),
        workspace.get("folder"),
        workspace.get("pipe"),
        workspace.put("folder", b""),
        workspace.put("pipe", b""),
        workspace.put("large", b"x" * (5 << 20)),
        workspace.restore(b"no archive"),
        workspace.run("python", "#" * 200_000),
    ):
        with pytest.raises(SandboxRefused):
            await refused
    assert (await workspace.run("python", "print('\0')")).exit == 127
    assert (await workspace.run("bash", "echo alive")).stdout == b"alive\n"


async def test_a_closed_workspace_is_lost(sandbox: Sandbox) -> None:
    workspace = await sandbox.open()
    running = asyncio.create_task(workspace.run("bash", "sleep 1000"))
    await asyncio.sleep(0.1)
    await workspace.close()
    await workspace.close()
    with pytest.raises(SandboxLost):
        await running
    with pytest.raises(SandboxLost):
        await workspace.run("bash", "echo")


# Which sandbox a config names, and whether one can be made here.


PROVIDER = """
import asyncio, tempfile
from rl_async.sandbox import Result, SandboxLost

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


@pytest.mark.slow
async def test_a_pause_of_the_sandbox_counts_little_of_a_programs_time(settings: SandboxConfig) -> None:
    if settings.kind != "bubblewrap":
        pytest.skip("only processes of this user can be stopped from here")
    opened = await make_sandbox(replace(settings, timeout_s=4.0)).open()
    running = asyncio.ensure_future(opened.run("bash", "sleep 1.2345; echo done"))
    begun, inside = False, list[psutil.Process]()
    while not begun:
        await asyncio.sleep(0.01)
        inside = psutil.Process().children(recursive=True)
        # Processes that set the sandbox up end meanwhile.
        with suppress(psutil.NoSuchProcess):
            begun = any("1.2345" in process.cmdline() for process in inside)
    for process in inside:
        process.suspend()
    await asyncio.sleep(4.5)
    for process in reversed(inside):
        process.resume()
    result = await running
    assert (result.stdout, result.limit) == (b"done\n", "")
    await opened.close()


# Workspaces over Sandbox Fusion's HTTP API, against a server that speaks it and runs programs in a folder of its own.


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
async def fusion(server: tuple[Server, SandboxConfig]) -> AsyncIterator[Workspace]:
    sandbox = await asyncio.to_thread(make_sandbox, server[1])
    opened = await sandbox.open()
    yield opened
    await opened.close()


async def test_programs_and_files(fusion: Workspace) -> None:
    await fusion.put("folder/given", b"5\n")
    result = await fusion.run("python", "print(open('folder/given').read() + input())", stdin=b"in")
    assert (result.stdout, result.exit, result.limit) == (b"5\nin\n", 0, "")
    result = await fusion.run("bash", "echo new > folder/new; ln -s /etc/passwd link; echo err >&2; exit 3")
    assert (result.stderr, result.exit) == (b"err\n", 3)
    assert await fusion.get("folder/new") == b"new\n"
    kept = await fusion.snapshot()
    await fusion.run("bash", "rm -r folder")
    for path in ("folder/new", "link", "../x", "/etc/passwd", "."):
        with pytest.raises(SandboxRefused):
            await fusion.get(path)
    await fusion.restore(kept)
    assert (await fusion.run("bash", "cat folder/*")).stdout == b"5\nnew\n"


async def test_limits(fusion: Workspace) -> None:
    result = await fusion.run("bash", "echo begun > log; sleep 1000", seconds=2)
    assert (result.exit, result.limit) == (-9, "seconds")
    assert await fusion.get("log") == b"begun\n"
    result = await fusion.run("bash", "yes | head -c 5000")
    assert (len(result.stdout), result.limit) == (1000, "output")
    assert (await fusion.run("bash", "head -c 9000000 /dev/zero > large")).exit != 0
    for path, data in (("large", bytes(2 << 20)), ("zero\0byte", b""), ("half\ud800", b"")):
        with pytest.raises(SandboxRefused):
            await fusion.put(path, data)


async def test_what_is_sent(server: tuple[Server, SandboxConfig], fusion: Workspace) -> None:
    await fusion.run("python", "print(1)")
    sent = server[0].requests[-1]
    assert (sent["language"], sent["memory_limit_MB"], sent["stdin"]) == ("bash", 1024, "")
    assert sent["run_timeout"] > 60 and len(sent["fetch_files"]) == 1


async def test_a_busy_server_is_asked_again_and_a_broken_one_is_lost(
    server: tuple[Server, SandboxConfig], fusion: Workspace
) -> None:
    server[0].answers = [(503, {}), (429, {})]
    assert (await fusion.run("bash", "echo 1")).stdout == b"1\n"
    error = {"status": "SandboxError", "message": "no", "run_result": {"status": "Error", "stderr": "no"}}
    for answer in ((200, error), (500, {}), (200, {"status": 1}), (200, {"status": "Success"})):
        server[0].answers = [answer]
        with pytest.raises(SandboxLost):
            await fusion.run("bash", "echo 1")
    await fusion.close()
    with pytest.raises(SandboxLost):
        await fusion.run("bash", "echo 1")


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
