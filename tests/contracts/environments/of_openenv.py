"""OpenEnv: the environment that its command line makes from its template, on a server of its own."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rl_async.errors import EnvironmentFailed
from tests.support.ports import free_port
from tests.unit.agent_loop.fakes import answered, session

OPTIONS = {"action": "message", "observation": "echoed_message"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "openenv.cli", "init", "echo_env"], cwd=folder, check=True, timeout=120)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "echo_env.server.app:app", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder) as server:
        yield f"http://127.0.0.1:{port}"
        server.terminate()


async def test_an_environment_on_a_server(url: str) -> None:
    for _ in range(120):  # until the server is up
        try:
            async with session(f"openenv:{url}", OPTIONS) as world:
                (first,) = await world.reset()
                ((step, (said,)),) = await answered(world, "hello")
                reward = await world.reward()
            break
        except EnvironmentFailed as error:
            if "ConnectionError" not in str(error):
                raise
            await asyncio.sleep(0.5)
    assert "ready" in first["content"] and said["content"] == "hello"
    assert step.reward == pytest.approx(0.5) and reward is not None and reward.value == 0.0


async def test_an_action_without_that_field_fails_the_sample(url: str) -> None:
    async with session(f"openenv:{url}", {"action": "no_such_field"}) as world:
        await world.reset()
        with pytest.raises(EnvironmentFailed, match=r"step\(\)"):
            await answered(world, "hello")
