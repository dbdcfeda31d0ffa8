"""Metrics and spans of episodes: Prometheus and OpenTelemetry, timed at the same places.

Counters and histograms cover samples, the parts of episodes and sampled tokens. Spans carry OpenTelemetry's attributes
for generative AI and no text of a conversation. ``trace`` is the episode's name, or empty if the episode is not traced
(``LeasedGroup.trace``): then no attribute is made, and only Prometheus counts.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from rl_async import tracing
from rl_async.messages import LeasedGroup, Trajectory
from rl_async.process.http_server import gauge
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.pool import EnginePool
from rl_async.tracing import AGENT, EPISODE, Value

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
# Labels: invoke_agent, chat, execute_tool or reward, and the name of an executed tool.
OPERATION = ("operation", "name")

SECONDS = Histogram(
    "rl_async_agent_seconds", "Duration of the parts of episodes.", OPERATION, buckets=BUCKETS_S, registry=None
)
ERRORS = Counter("rl_async_agent_errors", "Parts of episodes that failed.", OPERATION, registry=None)
CONVERSATIONS = Counter(
    "rl_async_agent_conversation_tokens",
    "Sampled tokens of agent programs, by conversation: main, other, left_out of training.",
    ["conversation"],
    registry=None,
)
TOKENS = Counter("rl_async_agent_tokens", "Tokens of prompts (input) and of answers (output).", ["kind"], registry=None)


# Finding a child by its labels takes longer than counting. The counter of errors exists from the start, at 0, so that
# Prometheus can compute rates.
@cache
def _part(operation: str, name: str) -> tuple[Histogram, Counter]:
    return SECONDS.labels(operation, name), ERRORS.labels(operation, name)


@cache
def _tokens(kind: str) -> Counter:
    return TOKENS.labels(kind)


def count(operation: str, name: str, seconds: float, failed: bool) -> None:
    """Count a part of an episode."""
    duration, errors = _part(operation, name)
    duration.observe(seconds)
    if failed:
        errors.inc()


class Player(Protocol):
    """A worker or a gateway: its samples by outcome, and how many it holds now."""

    put: int
    failed: int
    refused: int

    @property
    def held(self) -> int: ...


class SamplesCollector:
    """Collects the samples of a ``player``, and the requests that were replayed on another engine."""

    def __init__(self, player: Player, pool: EnginePool | None = None) -> None:
        self._player, self._pool = player, pool

    def collect(self) -> Iterator[Metric]:
        """Yield the current counts, and the durations, failures and tokens of this process."""
        samples = CounterMetricFamily("rl_async_agent_samples", "Samples, by how they ended.", labels=["outcome"])
        for outcome in ("put", "failed", "refused"):
            samples.add_metric([outcome], getattr(self._player, outcome))
        yield samples
        yield gauge("rl_async_agent_samples_held", "Samples that are leased and have not ended.", self._player.held)
        if self._pool is not None:
            replayed = "Requests replayed after an engine failed them."
            yield CounterMetricFamily("rl_async_agent_replayed_requests", replayed, self._pool.replayed)
        for instrument in (SECONDS, ERRORS, TOKENS, CONVERSATIONS):
            yield from instrument.collect()


# gen_ai.agent.name of programs that play through the gateway, and gen_ai.provider.name of the run's own engines.
PROGRAM = "program"
PROVIDER = "rl_async"


class _Timed:
    """Times a part of an episode and its optional span; yields the span's attributes.

    An ``error.type`` among them at the end counts as a failure, and so does an exception but a cancellation.
    """

    def __init__(self, operation: str, span: AbstractContextManager[dict[str, Value]] | None, name: str = "") -> None:
        self._operation, self._span, self._name = operation, span, name
        self._found: dict[str, Value] = {}

    def __enter__(self) -> dict[str, Value]:
        self._began = time.perf_counter()
        if self._span is not None:
            self._found = self._span.__enter__()
        return self._found

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        failed = "error.type" in self._found if kind is None else not issubclass(kind, asyncio.CancelledError)
        count(self._operation, self._name, time.perf_counter() - self._began, failed)


def of_agent(trace: str, group: LeasedGroup, loop: str) -> AbstractContextManager[dict[str, Value]]:
    """Span an episode while a loop plays it."""
    if not trace:
        return _Timed(AGENT, None)
    about = _of_agent(trace, group, loop)
    return _Timed(AGENT, tracing.span(trace, f"{AGENT} {loop}", about, key=AGENT, parent=EPISODE))


def played(trace: str, group: LeasedGroup, began: int, seconds: float, error: str = "") -> None:
    """Add the span of an episode that an agent program has played since ``began``, for ``seconds``."""
    count(AGENT, "", seconds, bool(error))
    if trace:
        about = _of_agent(trace, group, PROGRAM)
        tracing.add(trace, f"{AGENT} {PROGRAM}", began, about, key=AGENT, parent=EPISODE, error=error)


def _of_agent(trace: str, group: LeasedGroup, agent: str) -> dict[str, Value]:
    return {
        "gen_ai.operation.name": AGENT,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": agent,
        "gen_ai.conversation.id": trace,
        "rl_async.task_id": group.task.task_id,
    }


@contextmanager
def of_chat(trace: str, model: str, request: GenerateRequest) -> Iterator[Callable[[GenerateResult], None]]:
    """Time and span the sampling of one answer; yields a function to call with it."""
    span = None
    if trace:
        name = Path(model).name
        about: dict[str, Value] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.conversation.id": trace,
            "gen_ai.request.model": name,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.usage.input_tokens": len(request.token_ids),
        }
        span = tracing.span(trace, f"chat {name}", about, key=request.request_id)
    with _Timed("chat", span) as found:

        def note(result: GenerateResult) -> None:
            _tokens("input").inc(len(request.token_ids))
            _tokens("output").inc(len(result.token_ids))
            if span is not None:
                found["gen_ai.usage.output_tokens"] = len(result.token_ids)
                found["gen_ai.response.finish_reasons"] = [result.finish_reason]
                found["rl_async.versions"] = [str(run.version) for run in result.versions]

        yield note


def of_tool(trace: str, name: str, call_id: str) -> AbstractContextManager[dict[str, Value]]:
    if not trace:
        return _Timed("execute_tool", None, name)
    about: dict[str, Value] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
    }
    about |= {"gen_ai.tool.call.id": call_id} if call_id else {}
    return _Timed("execute_tool", tracing.span(trace, f"execute_tool {name}", about), name)


@contextmanager
def of_reward(trace: str, row: Trajectory) -> Iterator[None]:
    """Span the scoring of an episode, whose last row is ``row``."""
    span = tracing.span(trace, "reward", {}, key=f"reward {row.role}", parent=EPISODE) if trace else None
    with _Timed("reward", span) as found:
        yield
        if row.scored:
            found |= {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": row.reward}
        else:
            found["error.type"] = "not_scored"
