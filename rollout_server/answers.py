"""What makes an engine's answer fit to be trained on, whatever its dialect."""

from collections.abc import Callable, Sequence
from typing import Protocol

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import FinishReason, GenerateRequest, GenerateResult

ReadVersion = Callable[[str], Version]  # raises ValueError for a name that is not ours


class Span(Protocol):
    """Sampled tokens number ``start`` to ``end`` (exclusive) came from weights of this name."""

    version: str
    start: int
    end: int


class IncomingAnswer:
    """The answer to ``request`` as it comes in, in one part or in several.

    Tokens that come without a word on their weights are held back until it is known which sampled them: the embedded
    engine, and vLLM with our plugin, tell it with every part; vLLM by itself and SGLang only with the last one.
    """

    def __init__(self, url: str, request: GenerateRequest, read_version: ReadVersion) -> None:
        self._url, self._oldest, self._read_version = url, request.min_version, read_version
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._given = 0  # how many were handed out

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Sampled tokens, in order. Raises EngineRejected unless each has one log-probability."""
        if len(logprobs) != len(tokens):
            raise EngineRejected(f"{self._url} answered without one log-probability per sampled token")
        self._tokens += tokens
        self._logprobs += logprobs

    def part(self, spans: Sequence[Span], finish_reason: FinishReason) -> GenerateResult:
        """What was held back, given ``spans`` over all tokens so far; reason ``abort`` if more is to come.

        Raises EngineRejected unless each token has one version, EngineLost for versions that this run did not send, or
        older than the request's ``min_version``: engines have no such gate, so they may have sampled.
        """
        runs = [VersionRun(parse(self._url, span.version, self._read_version), span.start, span.end) for span in spans]
        if [run.start for run in runs] + [len(self._tokens)] != [0] + [run.end for run in runs]:
            raise EngineRejected(f"{self._url} answered without the weight version of every token")
        if runs and runs[0].version < self._oldest:
            raise EngineLost(f"{self._url} sampled with {runs[0].version}, older than {self._oldest}")
        start, self._given = self._given, len(self._tokens)
        return GenerateResult(
            token_ids=self._tokens[start:],
            logprobs=self._logprobs[start:],
            versions=[VersionRun(r.version, max(r.start, start) - start, r.end - start) for r in runs if r.end > start],
            finish_reason=finish_reason,
        )


def parse(url: str, name: str, read_version: ReadVersion = Version.parse) -> Version:
    """The version behind an engine's name for its weights. Raises EngineLost if this run did not send it."""
    try:
        return read_version(name)
    except ValueError as error:
        raise EngineLost(f"{url} serves weights {name!r} that this run did not send") from error
