"""Ranks that start and end together, as real processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl_async.launcher import supervisor as children_module
from rl_async.launcher.child_process import RoleFailed, ThisMachine
from rl_async.launcher.plan.planning import ProcessSpec
from rl_async.launcher.supervisor import Children
from rl_async.process.private_folder import RENDEZVOUS, private_folder
from tests.contracts.launcher.test_supervisor import eventually


async def test_ranks_that_were_asked_to_stop_are_not_waited_for_once_one_failed(rig: Any) -> None:
    scripts = {"a": "trap 'exit 1' TERM; echo; while :; do sleep 0.05; done", "b": "trap '' TERM; echo; sleep 600"}
    specs = [ProcessSpec(name=name, role="trainer", argv=("sh", "-c", script)) for name, script in scripts.items()]
    with Children(ThisMachine({}, rig.folder), rig.folder, specs) as children:
        for spec in specs:
            await children.start(spec)
        await eventually(lambda: all(children[name].output() for name in scripts))
        async with asyncio.timeout(60):
            await children.finish(scripts)
        assert (children["a"].returncode, children["b"].returncode) == (1, None)
        await children.stop(scripts, 0.0)


async def test_ranks_that_were_asked_to_stop_are_all_waited_for(rig: Any) -> None:
    go = rig.folder / "go"
    scripts = {
        "a": "trap 'exit 143' TERM; echo; while :; do sleep 0.05; done",
        "b": f"trap 'while ! [ -e {go} ]; do sleep 0.05; done; exit 143' TERM; echo; while :; do sleep 0.05; done",
    }
    specs = [ProcessSpec(name=name, role="trainer", argv=("sh", "-c", script)) for name, script in scripts.items()]
    with Children(ThisMachine({}, rig.folder), rig.folder, specs) as children:
        for spec in specs:
            await children.start(spec)
        await eventually(lambda: all(children[name].output() for name in scripts))
        finishing = asyncio.create_task(children.finish(scripts))
        await eventually(lambda: children["a"].returncode == 143)
        go.touch()
        async with asyncio.timeout(60):
            await finishing
        assert children["b"].returncode == 143


async def test_ranks_meet_by_a_file_that_is_new_at_each_start(rig: Any) -> None:
    specs = [ProcessSpec(name=n, role="trainer", argv=("sh", "-c", f"echo ${RENDEZVOUS}")) for n in ("a", "b")]
    found = []
    with Children(ThisMachine({}, rig.folder), rig.folder, specs) as children:
        for restarts in (0, 1):
            ranks = [await children.start(spec, restarts=restarts) for spec in specs]
            assert [await rank.wait() for rank in ranks] == [0, 0]
            found.append({Path(rank.output().split()[-1]) for rank in ranks})
    (first,), (second,) = found
    assert first != second and first.parent == second.parent == private_folder(rig.folder)


@pytest.mark.parametrize(("healthy_s", "restarts"), [(3600.0, None), (0.0, 1)])
async def test_restarts_are_forgiven_after_a_time_of_health(
    rig: Any, monkeypatch: pytest.MonkeyPatch, healthy_s: float, restarts: int | None
) -> None:
    monkeypatch.setattr(children_module, "HEALTHY_S", healthy_s)
    spec = ProcessSpec(name="a", role="worker", argv=("sh", "-c", "exit 1"), max_restarts=3)
    with Children(ThisMachine({}, rig.folder), rig.folder, [spec]) as children:
        child = await children.start(spec, restarts=3)
        code = await child.wait()
        if restarts is None:
            with pytest.raises(RoleFailed):
                await children.before_restart(spec, child, code, 3)
        else:
            assert await children.before_restart(spec, child, code, 3) == restarts
