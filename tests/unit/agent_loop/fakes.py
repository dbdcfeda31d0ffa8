"""A scripted engine, and short ways to make what a loop needs."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.environment_registry import get_environment
from rl_async.agent_loop.environments.session import Services, Session
from rl_async.agent_loop.gateway.chat import ChatMessage, ChatRequest
from rl_async.agent_loop.gateway.gateway_episode import GatewayEpisode
from rl_async.agent_loop.gateway.server import OpenEpisodes
from rl_async.agent_loop.tools.tool import Step
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import AgentConfig, RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineLost
from rl_async.messages import (
    Done,
    Leased,
    LeasedGroup,
    Refused,
    Renewed,
    SampleKey,
    Task,
    Trajectory,
    Version,
    VersionRun,
)
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult


class ScriptedEngine:
    """Says the given texts in order, each token with log-probability -0.5. ``versions[i]`` samples turn i."""

    def __init__(self, renderer: ChatRenderer, says: Sequence[str], versions: Sequence[int] = ()) -> None:
        self.renderer, self.says = renderer, list(says)
        self.versions = list(versions) or [0] * len(says)
        self.requests: list[GenerateRequest] = []
        self.sessions: list[str] = []

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        turn = len(self.requests)
        self.requests.append(request)
        self.sessions.append(session)
        spoken = [*self.renderer.encode(self.says[turn]), self.renderer.end_of_turn]
        reason = "stop" if len(spoken) <= request.max_tokens else "length"
        spoken = spoken[: request.max_tokens]
        runs = [VersionRun(Version(0, self.versions[turn]), 0, len(spoken))]
        return GenerateResult(token_ids=spoken, logprobs=[-0.5] * len(spoken), versions=runs, finish_reason=reason)


def run_config(rollout: dict[str, Any] | None = None, **agent: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        agent=AgentConfig(**{"loop": "tool_agent", "unprinted_tools": "allow", **agent}),
        rollout=RolloutConfig(**(rollout or {})),
    )


def leased(prompt: Any = "what is 2+3?", *, partition: str = "train", samples: int = 1, **task: Any) -> LeasedGroup:
    return LeasedGroup(
        group_id=7,
        partition=partition,
        attempt=1,
        samples=list(range(samples)),
        task=Task(
            **{
                "task_id": "t:0",
                "data_source": "test",
                "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
                "ground_truth": "5",
                **task,
            }
        ),
        min_version=Version(0, 3),
    )


# A gateway's episodes against a queue in memory.


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


# What the tests of single projects share.


def session(name: str, options: dict[str, Any] | None = None, **task: Any) -> Session:
    services = Services(run_config(environment=name, environment_options=options or {}))
    given = {"task_id": "t", "data_source": "d", "prompt": [], "ground_truth": "", **task}
    return Session(name, get_environment(name).make(Task(**given), services), 120.0)


async def answered(world: Session, *answers: str) -> list[tuple[Step, list[Message]]]:
    return [await world.step(answer) for answer in answers]
