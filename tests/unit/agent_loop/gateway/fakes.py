"""A gateway's episodes against a queue in memory."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.chat import ChatMessage, ChatRequest
from rl_async.agent_loop.gateway.gateway_episode import GatewayEpisode
from rl_async.agent_loop.gateway.server import OpenEpisodes
from rl_async.configs.schema.reward import RewardConfig
from rl_async.errors import EngineLost
from rl_async.messages import Done, Leased, LeasedGroup, Refused, Renewed, SampleKey, Trajectory
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from tests.unit.agent_loop.fakes import run_config


class FakeQueue:
    """Has the given groups, and says that the run is over when told to."""

    def __init__(self, groups: Sequence[LeasedGroup] = ()) -> None:
        self.groups = list(groups)
        self.rows: list[tuple[Trajectory, ...]] = []
        self.failures: list[tuple[int, int, str]] = []
        self.over = asyncio.Event()
        self.answer: Done | Refused = Done()
        self.failed = asyncio.Event()
        self.renewed: list[list[SampleKey]] = []
        self.gone: set[SampleKey] = set()
        self.renewal = asyncio.Event()

    async def lease(self, max_groups: int, wait_s: float, *, idle_s: float | None = None) -> Leased:
        if max_groups and self.groups:
            taken, self.groups = self.groups[:max_groups], self.groups[max_groups:]
            return Leased(groups=taken)
        await self.over.wait()
        return Leased(groups=[], finished=True)

    async def renew(self, held: list[SampleKey]) -> Renewed:
        self.renewed.append(held)
        self.renewal.set()
        return Renewed(gone=[key for key in held if key in self.gone])

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done | Refused:
        self.rows.append(rows)
        return self.answer

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done | Refused:
        self.failures.append((group_id, sample, error))
        self.failed.set()
        return Done()


class Gone:
    """An engine that is never there."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        raise EngineLost("no engine answered")


@asynccontextmanager
async def gateway(
    queue: FakeQueue, renderer: ChatRenderer, engine: Any, rollout: Any = None, **agent: Any
) -> AsyncIterator[OpenEpisodes]:
    config = run_config(rollout, **agent)
    async with RewardService(RewardConfig()) as rewards:
        episodes = OpenEpisodes(config, renderer, engine, queue, rewards)
        running = asyncio.create_task(episodes.run())
        yield episodes
        queue.over.set()
        await asyncio.wait_for(running, 10)


def ask(*texts: str, **changes: Any) -> ChatRequest:
    messages = [ChatMessage("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    plain = ChatRequest(messages, [], [], None, None, None, False, False, "")
    return plain._replace(**changes)


async def begin(episodes: OpenEpisodes) -> GatewayEpisode:
    episode = await episodes.begin(5.0)
    assert episode is not None
    return episode
