"""Trajectories to score."""

from collections.abc import Sequence

import numpy as np

from rl_async.messages import Sampling, Task, ToolCall, Trajectory, Turn
from rl_async.reward_loop.service import RewardService


def task(truth: str = "42") -> Task:
    prompt = [{"role": "user", "content": "?"}]
    return Task(task_id="t", data_source="unit", prompt=prompt, ground_truth=truth, extra={"level": 3})


def trajectory(answer: str, error: str = "") -> Trajectory:
    turns = [
        Turn(role="user", text="?"),
        Turn(role="assistant", text="call", tool_calls=[ToolCall(name="f", arguments="{}", result="1")]),
        Turn(role="tool", text="1"),
        Turn(role="assistant", text=answer),
    ]
    return Trajectory(
        task_id="t",
        group_id=0,
        sample=0,
        attempt=1,
        episode_id="e",
        token_ids=np.zeros(3, np.int32),
        loss_mask=np.ones(3, np.bool_),
        logprobs=np.zeros(3, np.float32),
        versions=[],
        sampling=Sampling(),
        reward=0.0,
        turns=turns,
        timings={"generate": 1.0},
        error=error,
    )


async def score(
    service: RewardService,
    answer: str,
    wanted: Task | None = None,
    *,
    error: str = "",
    turns: Sequence[Turn] | None = None,
) -> Trajectory:
    scored = trajectory(answer, error)
    scored.turns = scored.turns if turns is None else list(turns)
    await service.score(wanted or task(), scored)
    return scored
