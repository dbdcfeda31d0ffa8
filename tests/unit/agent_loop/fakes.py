"""A scripted engine, and short ways to make what a loop needs."""

from collections.abc import Sequence
from typing import Any

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import AgentConfig, RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import LeasedGroup, Task, Version, VersionRun
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
