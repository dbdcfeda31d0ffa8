"""An answer that comes in parts: how parts are joined, continued elsewhere, and read from a vLLM stream."""

from collections.abc import Sequence

import msgspec

from rl_async.messages import VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult

NOTHING = GenerateResult(token_ids=[], logprobs=[], versions=[], finish_reason="abort")


def join(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    """``second`` goes on where ``first`` was left; how it ended is how the whole ended."""
    offset = len(first.token_ids)
    runs = list(first.versions)
    for run in second.versions:
        if runs and runs[-1].version == run.version:
            runs[-1] = VersionRun(run.version, runs[-1].start, run.end + offset)
        else:
            runs.append(VersionRun(run.version, run.start + offset, run.end + offset))
    return GenerateResult(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        versions=runs,
        finish_reason=second.finish_reason,
    )


def continuation(request: GenerateRequest, done: GenerateResult) -> GenerateRequest:
    """The request for what is still missing. A prompt of another length makes other caches, so the id differs too."""
    if not done.token_ids:
        return request
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}+{len(done.token_ids)}",
        token_ids=request.token_ids + done.token_ids,
        max_tokens=request.max_tokens - len(done.token_ids),
    )


class Unversioned:
    """Tokens that came without a word on their weights. They are held back until it is known which sampled them.

    The embedded engine, and vLLM with our plugin, tell it with every part; vLLM by itself only with the last one.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._given = 0  # how many were handed out

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Sampled tokens, in order."""
        self._tokens += tokens
        self._logprobs += logprobs

    def take(self, runs: Sequence[VersionRun], finish_reason: str | None) -> GenerateResult:
        """The held-back tokens as a part, given ``runs`` that cover all tokens so far.

        Raises ValueError unless they do.
        """
        ends = [0] + [run.end for run in runs]
        if [run.start for run in runs] + [len(self._tokens)] != ends:
            raise ValueError("the weight versions do not cover the tokens")
        start, self._given = self._given, len(self._tokens)
        return GenerateResult(
            token_ids=self._tokens[start:],
            logprobs=self._logprobs[start:],
            versions=[VersionRun(r.version, max(r.start, start) - start, r.end - start) for r in runs if r.end > start],
            finish_reason=finish_reason or "abort",  # type: ignore[arg-type]
        )
