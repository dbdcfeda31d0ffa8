"""Environments in the worker's process and in hosts of their own: the same, but for what a host's end does."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments import host_wire
from rl_async.agent_loop.environments.environment_registry import LocalEnvironments
from rl_async.agent_loop.environments.host_pool import MARK, HostedEnvironments, HostLink
from rl_async.agent_loop.environments.session import Environments, OpenGame, Services
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.tools.tool import ToolResult
from rl_async.agent_loop.worker import AgentWorker
from rl_async.configs.schema.reward import RewardConfig, RewardTerm
from rl_async.configs.schema.rollout import EnvironmentHostsConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.messages import Task, Version, VersionRun
from rl_async.process.run_files import ENDED, state_of
from rl_async.reward_loop.api import Score
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.transfer_queue.client import QueueClient
from tests.contracts.queue.peers import FREE_PORT, SETTINGS, RunningQueue, worker
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import run_config

HERE = Path(__file__).parent
WORLDS = HERE / "worlds.py"
PATIENCE_S = 60.0

Open = Callable[..., AbstractAsyncContextManager[Any]]  # of Environments; each test knows whether it opens games


def task(name: str = "t", truth: str = "4") -> Task:
    return Task(task_id=name, data_source="d", prompt=[], ground_truth=truth)


def config_of(world: str, folder: Path, hosts: dict[str, Any] | None, **agent: Any) -> RunConfig:
    return run_config(
        environment=world if ":" in world or world == "order" else f"{WORLDS}:{world}",
        environment_options={} if world == "order" else {"folder": str(folder)},
        environment_hosts=None if hosts is None else EnvironmentHostsConfig(**hosts),
        **{"concurrency": 8, **agent},
    )


@asynccontextmanager
async def hosted(world: str, folder: Path, hosts: dict[str, Any] | None = None, **agent: Any) -> AsyncIterator[Any]:
    async with HostedEnvironments(config_of(world, folder, hosts or {}, **agent), folder, "test") as environments:
        yield environments


@asynccontextmanager
async def local(world: str, folder: Path, **agent: Any) -> AsyncIterator[Environments]:
    config = config_of(world, folder, None, **agent)
    yield LocalEnvironments(str(config.agent.environment), Services(config))


both = pytest.mark.parametrize("where", [local, hosted])


async def until(found: Callable[[], Any]) -> Any:
    """Wait for something that happens in another process, and return it."""
    end = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)
    return value


def files(folder: Path, prefix: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{prefix}*"))


@both
async def test_a_game_from_its_reset_to_its_reward(where: Open, tmp_path: Path) -> None:
    async with where("Game", tmp_path) as environments:
        async with environments.open(task()) as game:
            assert [message["role"] for message in await game.reset()] == ["system", "user"]
            step, messages = await game.step("2")
            assert (step.reward, step.reason, step.done) == (-0.25, "wrong", False)
            assert messages == [{"role": "user", "content": "higher"}]
            step, messages = await game.step("4")
            assert (step.reward, bool(step.done), messages) == (1.0, True, [])
            assert await game.reward() == Score(1.0, {"guesses": 2.0})
            assert files(tmp_path, "closed") == []
        assert len(files(tmp_path, "closed")) == 1


@both
async def test_tools_with_their_schemas_rewards_and_errors(where: Open, tmp_path: Path) -> None:
    async with where("Game", tmp_path) as environments, environments.open(task()) as game:
        await game.reset()
        tools = {tool.name: tool for tool in game.tools()}
        function = tools["submit"].schema["function"]
        assert (function["description"], function["parameters"]["required"]) == ("Submit a number.", ["number"])
        result = await tools["submit"].call({"number": 4}, timeout_s=PATIENCE_S)
        assert result == ToolResult('{"noted":4}', reward=0.5, reason="submitted", done=True)
        assert (await tools["submit"].call({"number": "x"}, timeout_s=PATIENCE_S)).error == "bad arguments"
        assert (await tools["broken"].call({"at": "here"}, timeout_s=PATIENCE_S)).error == "'here'"
        pid = int((await tools["pid"].call({}, timeout_s=PATIENCE_S)).text)
    assert (pid == os.getpid()) == (where is local)


@both
async def test_a_game_of_several_roles(where: Open, tmp_path: Path) -> None:
    async with where("Haggle", tmp_path) as environments:
        async with environments.open(task()) as game:
            assert isinstance(game, OpenGame) and list(game.roles) == ["seller", "buyer"]
            first, messages = await game.reset()
            assert (first.to, messages) == ("seller", [{"role": "user", "content": "name a price"}])
            tools = {role: tool for role, (tool,) in game.tools().items()}
            assert tools["buyer"].schema["function"]["description"] == "What it is worth to the buyer."
            worth = [await tools[role].call({"of": "it"}, timeout_s=PATIENCE_S) for role in game.roles]
            assert worth == [ToolResult("it: 3", reward=0.5), ToolResult("it: 5")]
            step, messages = await game.step("4")
            assert (step.to, step.reward, step.reason, step.done) == ("buyer", -0.25, "asked", False)
            assert messages == [{"role": "user", "content": "for 4?"}]
            step, messages = await game.step("yes")
            assert (step.reward, bool(step.done), messages) == (1.0, True, [])
            assert await game.reward() == {"seller": Score(1.0), "buyer": Score(-1.0, {"turns": 2.0})}
        assert len(files(tmp_path, "closed")) == 1


@both
@pytest.mark.parametrize(
    ("answer", "named"), [pytest.param("raise", "worlds.py:", marks=pytest.mark.slow), ("forge", "assistant")]
)
async def test_what_a_game_does_wrong_fails_its_episode_alone(
    where: Open, tmp_path: Path, answer: str, named: str
) -> None:
    async with where("Game", tmp_path) as environments, environments.open(task()) as other:
        with pytest.raises(EnvironmentFailed, match=r"step\(\)") as failed:
            async with environments.open(task()) as game:
                await game.step(answer)
        assert named in str(failed.value)
        assert len(files(tmp_path, "closed")) == 1
        assert (await other.step("2"))[0].reason == "wrong"


@both
async def test_what_cannot_be_made_fails_its_episode(where: Open, tmp_path: Path) -> None:
    async with where("Unmade", tmp_path) as environments:
        with pytest.raises(EnvironmentFailed, match=r"__init__\(\) raised ValueError.*worlds\.py:"):
            async with environments.open(task()):
                pass


@both
async def test_what_is_prepared_becomes_the_environments(where: Open, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    async with where("Slow", tmp_path) as environments, environments.open(task()) as slow:
        (message,) = await slow.reset()
        assert files(tmp_path, "prepared-") == [f"prepared-{message['content']}"]
        assert files(tmp_path, "released-") == []
    assert files(tmp_path, "released-") == [f"released-{message['content']}"]


@both
async def test_a_mistake_in_the_data_stays_the_users(where: Open, tmp_path: Path) -> None:
    async with where("order", tmp_path) as environments:
        with pytest.raises(DataError, match=r"extra_info\.count"):
            async with environments.open(task()):
                pass


async def pid_of(environments: Environments) -> int:
    async with environments.open(task()) as game:
        (tool,) = [tool for tool in game.tools() if tool.name == "pid"]
        return int((await tool.call({}, timeout_s=PATIENCE_S)).text)


async def test_the_host_of_a_hanging_step_ends_when_its_other_episodes_have(tmp_path: Path) -> None:
    async with hosted("Game", tmp_path, environment_timeout_s=3.0) as environments:
        old = await pid_of(environments)
        async with environments.open(task()) as other:
            with pytest.raises(EnvironmentFailed, match=r"step\(\).*agent\.environment_timeout_s"):
                async with environments.open(task()) as game:
                    await game.step("hang")
            assert await pid_of(environments) != old
            assert (await other.step("2"))[0].reason == "wrong"
            assert state_of(old) not in ENDED
        await until(lambda: state_of(old) in ENDED)


async def test_environments_are_ready_before_an_episode_wants_one(tmp_path: Path) -> None:
    async with hosted("Slow", tmp_path, {"ready": 2}) as environments:
        await until(lambda: len(files(tmp_path, "preparing-")) == 2)
        (tmp_path / "gate").touch()
        first = set(await until(lambda: len(found := files(tmp_path, "prepared-")) == 2 and found))
        async with environments.open(task()) as slow:
            (message,) = await slow.reset()
            assert f"prepared-{message['content']}" in first
            await until(lambda: len(files(tmp_path, "prepared-")) == 3)  # in its place
    assert len(files(tmp_path, "released-")) == 3, "also those that no episode got"


async def test_no_more_start_at_once_than_allowed(tmp_path: Path) -> None:
    async with hosted("Slow", tmp_path, {"starting": 2, "processes": 2}) as environments:

        async def play() -> str:
            async with environments.open(task()) as slow:
                (message,) = await slow.reset()
                return str(message["content"])

        episodes = [asyncio.create_task(play()) for _ in range(5)]
        await until(lambda: len(files(tmp_path, "preparing-")) == 2)
        assert len(files(tmp_path, "preparing-")) == 2
        (tmp_path / "gate").touch()
        names = await asyncio.gather(*episodes)
    assert len(set(names)) == 5


@pytest.mark.parametrize("welcomed", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_host_that_is_starting_when_all_are_closed_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, welcomed: bool
) -> None:
    """Closing finds no process of the second host yet, which welcomes the pool before the first has ended, or later."""
    make, start, close = asyncio.create_subprocess_exec, HostLink.start, HostLink.close
    makes, welcomes, closes = itertools.count(), itertools.count(), itertools.count()
    closing, both_welcome = asyncio.Event(), asyncio.Event()
    made = []

    async def make_the_second_late(*command: Any, **settings: Any) -> asyncio.subprocess.Process:
        if next(makes):
            await closing.wait()
        made.append(await make(*command, **settings))
        return made[-1]

    async def start_counted(link: HostLink, config: RunConfig) -> host_wire.Welcome:
        welcome = await start(link, config)
        if next(welcomes):
            both_welcome.set()
        return welcome

    async def close_the_first_late(link: HostLink) -> None:
        if not next(closes) and welcomed:
            await both_welcome.wait()
        await close(link)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", make_the_second_late)
    monkeypatch.setattr(HostLink, "start", start_counted)
    monkeypatch.setattr(HostLink, "close", close_the_first_late)
    async with hosted("Slow", tmp_path, {"processes": 2}):
        asyncio.get_running_loop().call_soon(closing.set)
    assert both_welcome.is_set() or not welcomed
    assert len(made) == 2 and None not in {process.returncode for process in made}


async def test_a_preparation_that_fails_or_hangs_fails_an_episode_and_the_next_is_well(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    async with hosted("Slow", tmp_path, {"start_timeout_s": 8.0}) as environments:
        with pytest.raises(EnvironmentFailed, match=r"prepare\(\).*start_timeout_s"):
            async with environments.open(task()):
                pass
        (tmp_path / "gate").touch()
        with pytest.raises(EnvironmentFailed, match="no image"):
            async with environments.open(task()):
                pass
        (tmp_path / "broken").unlink()
        async with environments.open(task()) as slow:
            assert await slow.reset()


async def test_an_episode_that_waits_may_be_given_up(tmp_path: Path) -> None:
    async with hosted("Slow", tmp_path) as environments:

        async def play() -> None:
            async with environments.open(task()):
                pass

        episode = asyncio.create_task(play())
        await until(lambda: files(tmp_path, "preparing-"))
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        (tmp_path / "gate").touch()
        await play()


@pytest.mark.slow
async def test_a_host_that_ends_itself_again_and_again_is_started_again(tmp_path: Path) -> None:
    async with hosted("EndsItsProcess", tmp_path) as environments:
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match="ended with 7"):
                async with environments.open(task()):
                    pass


@pytest.mark.parametrize(
    ("world", "hosts", "named"),
    [
        pytest.param("Missing", {}, "agent.environment", marks=pytest.mark.slow),
        ("Game", {"ready": 1}, "agent.environment_hosts.ready"),
    ],
)
async def test_what_cannot_work_is_a_config_error(
    tmp_path: Path, world: str, hosts: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        async with hosted(world, tmp_path, hosts):
            pass


class Says4:
    """An engine that answers 4 to everything."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.spoken = [*renderer.encode("4"), renderer.end_of_turn]

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        runs = [VersionRun(Version(), 0, len(self.spoken))]
        return GenerateResult(
            token_ids=self.spoken, logprobs=[-1.0] * len(self.spoken), versions=runs, finish_reason="stop"
        )


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(train_tokenizer(demos("shop", 100), 200))


async def test_samples_of_a_killed_host_are_played_again_and_each_is_trained_once(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    queue = RunningQueue(FREE_PORT, replace(SETTINGS, steps=1))
    config = replace(config_of("Gated", tmp_path, {}), reward=RewardConfig(functions=(RewardTerm(name="environment"),)))
    config = replace(config, rollout=replace(config.rollout, group_size=2))
    try:
        async with (
            worker(queue, "agent") as client,
            QueueClient(queue.address, role="trainer", name="trainer-0") as trainer,
            HostedEnvironments(config, tmp_path, "test") as environments,
            RewardService(config.reward) as rewards,
        ):
            await trainer.publish(Version(0, 0), [])
            runner = EpisodeRunner(config, renderer, Says4(renderer), hosted=environments)
            playing = asyncio.create_task(AgentWorker(client, runner, rewards, config).run())
            first = await until(lambda: len(found := files(tmp_path, "stepping-")) >= 4 and found)
            (pid,) = {int(name.split("-")[1]) for name in first}
            os.kill(pid, signal.SIGKILL)
            (tmp_path / "gate").touch()
            batch = await trainer.reserve(0, PATIENCE_S)
            rows = await trainer.fetch([header.key for header in batch.headers])
            await trainer.finish()
            await playing
    finally:
        queue.stop()
    assert sorted((row.group_id, row.sample) for row in rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row.attempt > 0 for row in rows) and all(row.reward == 1.0 for row in rows)


async def hold(folder: Path) -> None:
    """Hold an environment in a host as a worker does: ``python -m tests.contracts.environments.test_hosts FOLDER``."""
    async with hosted("Parent", folder) as environments, environments.open(task("held")) as parent:
        print("in a step", flush=True)
        await parent.step("go")


def test_nothing_is_left_of_a_worker_that_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.contracts.environments.test_hosts", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[2]) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "in a step\n"
        host, child = json.loads((tmp_path / "pids-held").read_text())
        assert not {state_of(host), state_of(child)} & set(ENDED)
        holder.send_signal(signal.SIGKILL)
    end = time.monotonic() + PATIENCE_S
    while left := [pid for pid in (host, child) if state_of(pid) not in ENDED]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    "killed", ["host", pytest.param("its guard", marks=pytest.mark.slow), "its guard, without a folder"]
)
async def test_what_a_killed_host_had_started_is_ended(tmp_path: Path, killed: str) -> None:
    async with hosted("Parent", tmp_path) as environments:
        with pytest.raises(EnvironmentFailed, match="environment host 0"):
            async with environments.open(task("a")) as parent:
                stepping = asyncio.create_task(parent.step("go"))
                host, child = json.loads((tmp_path / "pids-a").read_text())
                if killed == "its guard, without a folder":  # as a host may delete it
                    os.rmdir(psutil.Process(host).environ()[MARK])
                os.kill(host if killed == "host" else parent_of(host), signal.SIGKILL)
                await stepping
        await until(lambda: state_of(child) in ENDED)
        async with environments.open(task("b")):
            again, child = json.loads((tmp_path / "pids-b").read_text())
            assert again != host
    assert state_of(again) in ENDED and state_of(child) in ENDED


if __name__ == "__main__":
    asyncio.run(hold(Path(sys.argv[1])))
