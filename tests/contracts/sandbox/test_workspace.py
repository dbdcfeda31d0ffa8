"""What any sandbox does for programs that behave."""

import asyncio

import pytest

from rl_async.sandbox.api import Sandbox, SandboxLost, SandboxRefused, Workspace


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
