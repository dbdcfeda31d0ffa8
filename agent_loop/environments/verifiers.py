"""`verifiers:NAME`: environments of verifiers' classic interface (`load_environment`), with their rubric.

verifiers' own rollout runs, and asks this adapter for the model's answers: so a SingleTurnEnv, a MultiTurnEnv and
classes derived from them decide themselves about their messages and the end.

    answer ──> step() ──> the rollout's pending request ──> env_response ──> next request ──> observation
"""

import asyncio
import functools
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.step import Step
from rl_async.errors import EnvironmentFailed
from rl_async.messages import Task


class Verifiers:
    """Options are those of the environment's ``load_environment``. The rubric's reward is the episode's.

    A task has its columns where verl has them: ``prompt``, the ground truth (``answer``) and ``extra_info.info``. Tools
    that verifiers offers in the request itself (ToolEnv), and rubrics that compare whole groups, are refused.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._name, self._task, self._options = name, task, options
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._pending: _Request | None = None
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self) -> list[Message]:
        self._world = _load(self._name, msgspec.json.encode(self._options))
        task = self._task
        row = {
            "prompt": task.prompt,
            "answer": task.ground_truth,
            "example_id": task.extra.get("index", 0),
            "info": task.extra.get("info") or {},
        }
        rollout = self._world.rollout(row, _client(self._requests), "policy", {})
        self._rollout = asyncio.create_task(rollout, name="verifiers")
        first = await self._next_request()
        if first is None:
            raise EnvironmentFailed(f"verifiers:{self._name} ended before the first turn")
        if first.messages[: len(task.prompt)] != _plain(task.prompt):
            raise EnvironmentFailed(f"verifiers:{self._name} changes the prompt of its task, which is already fixed")
        return first.messages[len(task.prompt) :]

    async def step(self, answer: str) -> Step:
        assert self._pending is not None
        # The messages until now, and this answer.
        known = len(self._pending.messages) + 1
        self._pending.answer.set_result(answer)
        request = await self._next_request()
        if request is None:
            return Step(done=True)
        return Step(request.messages[known:] or None)

    async def reward(self) -> dict[str, float]:
        import verifiers

        assert self._rollout is not None
        # The episode ended on our side: turns or tokens were used up.
        if self._pending is not None:
            self._pending.answer.set_exception(verifiers.OverlongPromptError("the episode has no room for more"))
            self._pending = None
        state = await self._rollout
        await self._world.rubric.score_rollout(state)
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return metrics | {"score": float(state["reward"])}

    async def close(self) -> None:
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.wait([self._rollout])

    async def _next_request(self) -> "_Request | None":
        """Wait for the rollout's next request; None at its end. Raises EnvironmentFailed if it ended in error."""
        assert self._rollout is not None
        asked = asyncio.create_task(self._requests.get(), name="verifiers request")
        try:
            await asyncio.wait([asked, self._rollout], return_when=asyncio.FIRST_COMPLETED)
            self._pending = asked.result() if asked.done() else None
        finally:
            asked.cancel()
        if self._pending is None and (error := (await self._rollout).get("error")):
            raise EnvironmentFailed(f"verifiers:{self._name}: {type(error).__name__}: {error}")
        return self._pending


class _Request:
    """The conversation that the model is asked to continue."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()


@functools.cache
def _load(name: str, options: bytes) -> Any:
    """Load an environment, which works in the main thread alone: it handles signals, and those are the worker's."""
    import verifiers

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return verifiers.load_environment(name, **msgspec.json.decode(options))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _plain(messages: Sequence[Any]) -> list[Message]:
    """Return messages of any form with role and content as text."""
    plain = []
    for message in messages:
        given = message if isinstance(message, dict) else message.model_dump()
        content = given.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        plain.append({"role": given["role"], "content": content or ""})
    return plain


def _client(requests: "asyncio.Queue[_Request]") -> Any:
    """Make verifiers' client of a model that is asked through ``requests``."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Policy(Client):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Response:
            if tools:
                raise EnvironmentFailed("verifiers: environments that offer tools in the request are not supported")
            request = _Request(_plain(prompt))
            requests.put_nowait(request)
            said = await request.answer
            message = ResponseMessage(content=said, finish_reason="stop", is_truncated=False)
            return Response(id="episode", created=0, model=model, message=message)

        def setup_client(self, config: Any) -> Any: ...
        async def to_native_tool(self, tool: Any) -> Any: ...
        async def to_native_prompt(self, messages: Any) -> Any: ...
        async def get_native_response(self, *_: Any, **__: Any) -> Any: ...
        async def raise_from_native_response(self, response: Any) -> None: ...
        async def from_native_response(self, response: Any) -> Any: ...
        async def close(self) -> None: ...

    return Policy(None)
