"""The spans of an episode that is played, with OpenTelemetry's attributes for generative AI, and not what was said.

The same places are timed for Prometheus (``metrics.py``), whether the run is traced or not.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rl_async import tracing
from rl_async.agent_loop.metrics import ERRORS, SECONDS, TOKENS
from rl_async.messages import LeasedGroup, Trajectory
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.tracing import AGENT, EPISODE

PROGRAM = "program"  # gen_ai.agent.name of whatever plays through the gateway
PROVIDER = "rl_async"  # gen_ai.provider.name of the run's own engines


def of_agent(episode: str, group: LeasedGroup, loop: str) -> AbstractContextManager[dict[str, tracing.Value]]:
    """Span an episode while a loop plays it."""
    about = _of_agent(episode, group, loop)
    return _timed(AGENT, tracing.span(episode, f"{AGENT} {loop}", about, key=AGENT, parent=EPISODE))


@contextmanager
def _timed(
    operation: str, span: AbstractContextManager[dict[str, tracing.Value]], name: str = ""
) -> Iterator[dict[str, tracing.Value]]:
    """Time a span; an ``error.type`` at its end counts as a failure, and so does an exception but a cancellation."""
    began, failed = time.perf_counter(), True
    try:
        with span as found:
            yield found
        failed = "error.type" in found
    except asyncio.CancelledError:
        failed = False
        raise
    finally:
        _count(operation, name, time.perf_counter() - began, failed)


def _count(operation: str, name: str, seconds: float, failed: bool) -> None:
    SECONDS.labels(operation, name).observe(seconds)
    ERRORS.labels(operation, name).inc(failed)  # 0 at first, so that rates are known from the start


def played(episode: str, group: LeasedGroup, began: int, seconds: float, error: str = "") -> None:
    """Add the span of an episode that an agent program has played since ``began``, for ``seconds``."""
    _count(AGENT, "", seconds, bool(error))
    about = _of_agent(episode, group, PROGRAM)
    tracing.add(episode, f"{AGENT} {PROGRAM}", began, about, key=AGENT, parent=EPISODE, error=error)


def _of_agent(episode: str, group: LeasedGroup, agent: str) -> dict[str, tracing.Value]:
    return {
        "gen_ai.operation.name": AGENT,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": agent,
        "gen_ai.conversation.id": episode,
        "rl_async.task_id": group.task.task_id,
    }


@contextmanager
def of_chat(episode: str, model: str, request: GenerateRequest) -> Iterator[Callable[[GenerateResult], None]]:
    """Span the sampling of one answer; what it gives is to be called with the answer."""
    name = Path(model).name
    about: dict[str, tracing.Value] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.conversation.id": episode,
        "gen_ai.request.model": name,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.usage.input_tokens": len(request.token_ids),
    }
    with _timed("chat", tracing.span(episode, f"chat {name}", about)) as found:

        def sampled(result: GenerateResult) -> None:
            TOKENS.labels("input").inc(len(request.token_ids))
            TOKENS.labels("output").inc(len(result.token_ids))
            found["gen_ai.usage.output_tokens"] = len(result.token_ids)
            found["gen_ai.response.finish_reasons"] = [result.finish_reason]
            found["rl_async.versions"] = [str(run.version) for run in result.versions]

        yield sampled


def of_tool(episode: str, name: str, call_id: str) -> AbstractContextManager[dict[str, tracing.Value]]:
    """Span one call of a tool."""
    about: dict[str, tracing.Value] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
    }
    about |= {"gen_ai.tool.call.id": call_id} if call_id else {}
    return _timed("execute_tool", tracing.span(episode, f"execute_tool {name}", about), name)


@contextmanager
def of_reward(episode: str, row: Trajectory) -> Iterator[None]:
    """Span the scoring of an episode, whose last row is ``row``."""
    with _timed("reward", tracing.span(episode, "reward", {}, parent=EPISODE)) as found:
        yield
        if row.scored:
            found |= {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": row.reward}
        else:
            found["error.type"] = "not_scored"
