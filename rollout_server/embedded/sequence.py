"""One sample of one request, from submission to its finish reason."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rl_async.messages import Sampling
from rl_async.rollout_server.api import FinishReason
from rl_async.rollout_server.embedded.grammars import Matcher


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens sampled for it so far; ``index`` numbers the samples of one request.

    ``tokens`` holds prompt and samples; ``logprobs`` and ``runs`` count samples only. ``deliver`` is called in the
    engine's thread, once, when the sequence is finished; ``progress``, if set, after every ``stream_interval`` tokens.
    """

    request_id: str
    tokens: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]
    seed: int | None
    deliver: Callable[["Sequence"], None]
    progress: Callable[["Sequence"], None] | None = None
    stream_interval: int = 1
    index: int = 0
    matcher: Matcher | None = None  # of the grammar that the samples must follow
    stuck: str = ""  # why its grammar allows no token: nothing more can be sampled
    logprobs: list[float] = field(default_factory=list)
    runs: list[tuple[str, int]] = field(default_factory=list)  # (version, number of its first sample)
    finish_reason: FinishReason | None = None
    prompt_length: int = 0
    cached_tokens: int = 0  # of the prompt, that were not computed for it
    routed_from: int = 0  # the first token whose experts the answer names
    routes: Tensor | None = None  # [tokens, layers, k], experts of the first tokens, as they were first computed
    number: int = 0  # in the order of arrival
    traceparent: str = ""  # the span of the request; empty: it has none
    arrived_at: int = field(default_factory=time.time_ns)
    admitted_at: int = 0  # for the first time
    sampled_at: int = 0  # the first token
    ended_at: int = 0  # unless it was aborted

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    def admit(self) -> None:
        """Note that the prompt is computed now; again after a preemption, which changes nothing."""
        self.admitted_at = self.admitted_at or time.time_ns()

    @property
    def sampled(self) -> list[int]:
        """The sampled tokens, without the prompt."""
        return self.tokens[self.prompt_length :]

    def append(
        self, token: int, logprob: float, version: str, max_length: int, ends: Callable[[], None] = lambda: None
    ) -> bool:
        """Append one sampled token. Returns whether the sequence is now finished; ``ends`` is called before other
        threads can see that it is."""
        if self.stuck:
            self.finish_reason = "abort"
            return True
        if not self.runs or self.runs[-1][0] != version:
            self.runs.append((version, len(self.logprobs)))
            self.sampled_at = self.sampled_at or time.time_ns()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.matcher is not None:
            self.matcher.accept(token)
        if token in self.stop_token_ids:
            self._end("stop", ends)
        elif len(self.logprobs) >= self.max_tokens or len(self.tokens) >= max_length:
            self._end("length", ends)
        return self.finish_reason is not None

    def _end(self, reason: FinishReason, ends: Callable[[], None]) -> None:
        ends()
        self.ended_at = time.time_ns()
        self.finish_reason = reason

    def spans(self, count: int) -> list[tuple[str, int, int]]:
        """Return (version, start, end) over the first ``count`` sampled tokens."""
        runs = [(version, start) for version, start in self.runs if start < count]
        ends = [start for _, start in runs[1:]] + [count] * bool(runs)
        return [(version, start, end) for (version, start), end in zip(runs, ends, strict=True)]

    @property
    def part_is_full(self) -> bool:
        """Whether the tokens sampled so far fill the parts of a stream."""
        return len(self.logprobs) % self.stream_interval == 0
