"""Episodes are leased on demand, listed, and given up when they are late or silent."""

import asyncio
import sys
import time

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway import open_episodes
from rl_async.agent_loop.gateway.open_episodes import Ending
from rl_async.agent_loop.worker import FIRST_LINES
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.errors import RequestRefused
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from tests.unit.agent_loop.fakes import ScriptedEngine, leased
from tests.unit.agent_loop.gateway.fakes import FakeQueue, Gone, ask, begin, gateway


async def test_samples_are_leased_when_asked_for_and_named_by_secrets(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=2), leased(samples=1)])
    async with gateway(queue, renderer, Gone()) as episodes:
        await asyncio.sleep(0)
        assert len(queue.groups) == 2
        first, second = await begin(episodes), await begin(episodes)
        assert len(queue.groups) == 1 and (first.sample, second.sample) == (0, 1)
        assert len({first.id, second.id}) == 2 and len(first.id) >= 22
        waiting = asyncio.create_task(begin(episodes))
        assert (await waiting).sample == 0
        assert await episodes.begin(0.01) is None and not episodes.finished
        late = asyncio.create_task(episodes.begin(30.0))
        await asyncio.sleep(0)
        queue.over.set()
        assert await late is None and episodes.finished


async def renewal(queue: FakeQueue) -> None:
    queue.renewed.clear()
    queue.renewal.clear()
    async with asyncio.timeout(10):
        await queue.renewal.wait()


async def test_renewals_list_open_episodes_and_samples_that_no_program_has(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_episodes, "RENEWALS_PER_LEASE", 1500)
    queue = FakeQueue([leased(samples=2)])
    async with gateway(queue, renderer, Gone()) as episodes:
        episode = await begin(episodes)
        await renewal(queue)
        assert sorted(queue.renewed[0]) == [(7, 0, 1), (7, 1, 1)]
        await episodes.end(episode.id, Ending(error="given up"))
        await renewal(queue)
        assert queue.renewed[0] == [(7, 1, 1)]


async def test_samples_that_another_worker_plays_end(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_episodes, "RENEWALS_PER_LEASE", 1500)
    queue = FakeQueue([leased(samples=3)])
    async with gateway(queue, renderer, Gone()) as episodes:
        taken, kept = await begin(episodes), await begin(episodes)
        queue.gone = {(7, taken.sample, 1), (7, 2, 1)}
        async with asyncio.timeout(10):
            await queue.failed.wait()
        await renewal(queue)
        assert queue.renewed[-1] == [(7, kept.sample, 1)]
        with pytest.raises(RequestRefused) as refused:
            episodes.get(taken.id)
        assert refused.value.code == "episode_ended"
    assert [sample for _, sample, _ in queue.failures] == [taken.sample]


@pytest.mark.usefixtures("simulated_time")
async def test_episodes_without_an_end_and_samples_without_a_program_are_given_up(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=3)])
    async with gateway(queue, renderer, Gone(), episode_timeout_s=0.05) as episodes:
        episode = await begin(episodes)
        async with asyncio.timeout(10):
            while len(queue.failures) < 3:
                queue.failed.clear()
                await queue.failed.wait()
        with pytest.raises(RequestRefused) as refused:
            episodes.get(episode.id)
        assert refused.value.code == "episode_ended"
    assert sorted(sample for _, sample, _ in queue.failures) == [0, 1, 2]
    assert {error.partition(":")[0] for _, _, error in queue.failures} == {
        "EpisodeTimeout",
        "no agent program requested it",
    }


@pytest.mark.usefixtures("simulated_time")
async def test_an_episode_whose_program_is_silent_is_given_up_and_one_with_heartbeats_is_not(
    renderer: ChatRenderer,
) -> None:
    queue = FakeQueue([leased(samples=3)])
    async with gateway(queue, renderer, Gone(), gateway=GatewayConfig(idle_timeout_s=2.0)) as episodes:
        silent, living = await begin(episodes), await begin(episodes)
        async with asyncio.timeout(30):
            while not queue.failures:
                living.heard()
                await asyncio.sleep(1.0)
        assert episodes.get(living.id) is living
        with pytest.raises(RequestRefused):
            episodes.get(silent.id)
        async with asyncio.timeout(30):
            while len(queue.failures) < 3:  # no program is left, and nobody asks for the third sample
                queue.failed.clear()
                await queue.failed.wait()
        assert episodes.unattended_s(time.monotonic()) > 2.0
    assert "agent.gateway.idle_timeout_s" in queue.failures[0][2]


@pytest.mark.usefixtures("simulated_time")
async def test_waiting_for_an_answer_is_no_silence(renderer: ChatRenderer) -> None:
    asked, answering = asyncio.Event(), asyncio.Event()
    scripted = ScriptedEngine(renderer, ["4"])

    class Slow:
        async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
            asked.set()
            await answering.wait()
            return await scripted.generate(request, session=session)

    queue = FakeQueue([leased(samples=2)])
    async with gateway(queue, renderer, Slow(), gateway=GatewayConfig(idle_timeout_s=0.2)) as episodes:
        waiting, silent = await begin(episodes), await begin(episodes)
        answer = asyncio.create_task(waiting.complete(ask("a?")))
        await asked.wait()
        async with asyncio.timeout(30):
            await queue.failed.wait()
        with pytest.raises(RequestRefused):
            episodes.get(silent.id)
        answering.set()
        assert (await answer).message.text == "4"
        assert (await episodes.end(waiting.id, Ending(reward=1.0))).accepted


async def test_failures_that_are_alike_do_not_flood_the_log(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    queue = FakeQueue([leased(samples=20)])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["5"])) as episodes:
        for number in range(20):
            await episodes.end((await begin(episodes)).id, Ending(error=f"browser {number} crashed"))
    assert len(queue.failures) == 20
    told = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(told) == FIRST_LINES + 3 and "16 times" in told[-1]


async def test_open_episodes_are_listed_without_their_ids_and_ended_by_name(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=2)])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["5"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?"))
        listing = episodes.listing()
        assert episode.id not in str(listing) and listing["samples_waiting"] == 1 and listing["unattended_s"] == 0
        (listed,) = listing["episodes"]
        assert (listed["episode"], listed["task_id"], listed["answers"]) == ("7.0.1", "t:0", 1)
        with pytest.raises(RequestRefused) as refused:
            await episodes.give_back("7.0.2", "x")
        assert refused.value.status == 404
        assert (await episodes.give_back("7.0.1", "x")).accepted and not episodes.listing()["episodes"]
    assert [(group, sample) for group, sample, _ in queue.failures] == [(7, 0)]


async def test_a_task_with_unlisted_tools_fails_and_loads_nothing(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(tools=["antigravity:fly"]), leased(tools=["calculator"])])
    async with gateway(queue, renderer, Gone()) as episodes:
        assert await episodes.begin(5.0) is None and not episodes.finished
        assert [tool.name for tool in (await begin(episodes)).tools] == ["calculator"]
    ((_, _, error),) = queue.failures
    assert "data.trust_code" in error and "antigravity" not in sys.modules
