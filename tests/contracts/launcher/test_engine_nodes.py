"""The processes of an engine of several nodes are one engine: they start, fail and end together."""

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from rl_async.launcher.plan.planning import Plan, PortWish
from rl_async.launcher.supervisor import RoleFailed, Supervisor
from tests.contracts.launcher.test_supervisor import eventually, registered, state, supervise


def of_two_nodes(plan: Plan) -> Plan:
    """The plan, with a process beside the engine that serves nothing."""
    (engine,) = plan.engines
    python, roles, _, folder, *_ = engine.argv
    follower = replace(engine, name="engine-0-node-1", argv=(python, roles, "follower", folder))
    return replace(plan, engines=(replace(engine, followers=(follower,)),))


async def until_registered(supervisor: Supervisor, *engines: str) -> None:
    async with asyncio.timeout(60):
        while sorted(await registered(supervisor)) != [*engines]:  # noqa: ASYNC110 - the registry sets no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("lost", ["engine", pytest.param("follower", marks=pytest.mark.slow)])
async def test_a_lost_node_starts_the_whole_engine_again(rig: Any, make_plan: Any, lost: str) -> None:
    async def meddle(supervisor: Supervisor) -> None:
        await until_registered(supervisor, "engine-0")
        await eventually(lambda: rig.pids("follower"))
        os.kill(rig.pids(lost)[-1], signal.SIGKILL)
        await until_registered(supervisor, "engine-0.1")
        await eventually(lambda: len(rig.pids("follower")) == 2)
        rig.go()

    await supervise(rig, of_two_nodes(make_plan(rig.folder)), meddle)
    assert len(rig.pids("engine")) == len(rig.pids("follower")) == 2


async def test_a_node_that_cannot_start_is_named_and_the_first_does_not_wait_for_it(rig: Any, make_plan: Any) -> None:
    rig.do("engine", "mute")
    rig.do("follower", "exit 7")
    with pytest.raises(RoleFailed, match="engine-0-node-1"):
        await supervise(rig, of_two_nodes(make_plan(rig.folder, max_restarts=0)))


@pytest.mark.slow
async def test_a_run_goes_on_without_an_engine_and_its_further_node(rig: Any, make_plan: Any) -> None:
    plan = of_two_nodes(make_plan(rig.folder, max_restarts=0))
    other = replace(plan.engines[0], name="engine-1", argv=(*plan.engines[0].argv[:-1], "{engine-1}"), followers=())
    plan = replace(plan, engines=(*plan.engines, other), ports=(*plan.ports, PortWish("engine-1")))

    async def meddle(supervisor: Supervisor) -> None:
        await until_registered(supervisor, "engine-0", "engine-1")
        os.kill(supervisor.children["engine-0"].pid, signal.SIGKILL)
        await eventually(lambda: state(supervisor, "engine-0")[0] == "failed")
        assert state(supervisor, "engine-0-node-1")[0] == "ended"
        rig.go()

    await supervise(rig, plan, meddle)
