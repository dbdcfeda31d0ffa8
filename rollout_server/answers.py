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


def checked(
    url: str,
    request: GenerateRequest,
    *,
    token_ids: list[int],
    logprobs: list[float],
    spans: Sequence[Span],
    finish_reason: FinishReason,
    read_version: ReadVersion,
) -> GenerateResult:
    """The result of ``request``.

    Raises EngineRejected unless each token has one log-probability and one version, EngineLost for versions that this
    run did not send, or older than ``request.min_version``: engines have no such gate, so they may have sampled.
    """
    if len(logprobs) != len(token_ids):
        raise EngineRejected(f"{url} answered without one log-probability per sampled token")
    versions = [VersionRun(parse(url, span.version, read_version), span.start, span.end) for span in spans]
    if [run.start for run in versions] + [len(token_ids)] != [0] + [run.end for run in versions]:
        raise EngineRejected(f"{url} answered without the weight version of every token")
    if versions and versions[0].version < request.min_version:
        raise EngineLost(f"{url} sampled with {versions[0].version}, older than {request.min_version}")
    return GenerateResult(token_ids=token_ids, logprobs=logprobs, versions=versions, finish_reason=finish_reason)


def parse(url: str, name: str, read_version: ReadVersion = Version.parse) -> Version:
    """The version behind an engine's name for its weights. Raises EngineLost if this run did not send it."""
    try:
        return read_version(name)
    except ValueError as error:
        raise EngineLost(f"{url} serves weights {name!r} that this run did not send") from error
