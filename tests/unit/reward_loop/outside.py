"""An HTTP server outside the system, which answers as a test says and remembers what it was asked."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from aiohttp import web

from rl_async.messages import Sampling, Task, ToolCall, Trajectory, Turn
from rl_async.reward_loop.service import RewardService

HANG_S = 3600.0
DEEP = '{"x": ' + "[" * 100_000


class Answer(NamedTuple):
    """One answer; ``body`` None: none at all, the connection stays open."""

    body: Any
    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


class Asked(NamedTuple):
    """One request."""

    body: dict[str, Any]
    authorization: str | None
    traceparent: str | None = None


class Outside:
    """Use it as ``async with``. ``answers`` are given in order, the last one again and again; or a function answers."""

    def __init__(self, *answers: Answer | Callable[[dict[str, Any]], Answer]) -> None:
        self._answers = list(answers)
        self.asked: list[Asked] = []
        self.running = self.most_running = 0

    async def __aenter__(self) -> "Outside":
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._answer)
        for path in ("/classify", "/v1/completions", "/detokenize"):
            application.router.add_post(path, self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(Asked(body, request.headers.get("Authorization"), request.headers.get("traceparent")))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if callable(answer):
            answer = answer(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(HANG_S if answer.body is None else 0.01)
        finally:
            self.running -= 1
        if answer.status == 0:  # hang up in the middle of an answer
            assert request.transport is not None
            request.transport.abort()
        if isinstance(answer.body, str):
            return web.Response(text=answer.body, status=answer.status or 200, headers=answer.headers)
        return web.json_response(answer.body, status=answer.status or 200, headers=answer.headers)


def says(content: str, finish_reason: str = "stop", **message: Any) -> Answer:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}}
    return Answer({"choices": [{**choice, "finish_reason": finish_reason}], "usage": {"total_tokens": 7}})


def verdict(score: Any) -> Answer:
    """A well-formed verdict."""
    return says(f'{{"reason": "because", "score": {score}}}')


# Trajectories to score.


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
