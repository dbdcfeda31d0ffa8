"""The request and the result of one generation, and what agent loops and servers have in common for it.

Every consumer of an engine has its own narrow Protocol: agent loops generate (``Generator`` below), the pool streams
and probes (``pool.py``), the weight-sync coordinator updates (``weight_sync/protocol.py``). The clients in ``vllm/``
and ``sglang/`` implement all of them.

``IncomingAnswer`` checks that an answer of any dialect can be trained on. ``join`` joins the parts of a stream, and
``continuation`` is the request that continues a partial answer on another engine.

``LineageFence``, a middleware around every server's routes, fences off a replaced trainer. A trainer's client names its
lineage in every request; agent workers do not. Every answer names the process that gave it, by which ``rl-async engine
add`` recognises a router over several engines.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Media, Sampling, Version, VersionRun
from rl_async.process.http_auth import HEALTH, App, Receive, Scope, Send, answer

LINEAGE_HEADER = "X-Trainer-Lineage"
PROCESS_HEADER = "X-Engine-Process"
# Engines do not use this status for any other purpose.
REPLACED = 412
# A longer number cannot count resumes, and Python refuses to parse thousands of digits.
_DIGITS = 18

PauseMode = Literal["keep", "wait", "abort"]
FinishReason = Literal["stop", "length", "abort"]
# The likeliest tokens that engines give, and so the most that a truncating sampler may keep; vLLM's own default.
MOST_ALTERNATIVES = 20
# A sampler may keep tokens beyond top_k that are as likely as the last one; so many more are asked for.
TIES = 4
# The log-probability of a token that the sampler dropped is at most this in vLLM's answers, which have no infinity.
DROPPED = -9999.0
# A kept set's probabilities sum to 1, but for the rounding of a normaliser over the vocabulary and of its logits.
WHOLE = 1e-3
# Called with all tokens sampled so far, whenever more arrive.
Heard = Callable[[Sequence[int]], None]


class Image(Media, frozen=True, kw_only=True, gc=False):
    """An image of a prompt, with the bytes of its file."""

    data: bytes

    @classmethod
    def of(cls, data: bytes, mime: str, position: int) -> "Image":
        """An image with these bytes, named by their hash."""
        media = Media.of(data, mime, position)
        return cls(sha256=media.sha256, mime=mime, position=position, data=data)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids, and how to continue it. ``max_tokens`` bounds the sampled tokens of this request.

    The ids of a prompt with ``images`` are expanded: from an image's ``position`` on, they are those that the model's
    processor puts in its place. Images are in the order of their positions.

    With a ``json_schema`` (JSON text) engines mask tokens that would violate it. The answer then fits the schema unless
    it is cut short, and log-probabilities are those of the masked distribution, renormalised.
    """

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]
    images: list[Image] = []
    seed: int | None = None
    min_version: Version = Version()
    # Without a schema, any text fits.
    json_schema: str = ""
    # The first token whose experts are wanted, if the engine records them.
    routed_from: int = 0
    # So many of the likeliest tokens are wanted for each sampled one, at most MOST_ALTERNATIVES; SGLang gives none.
    alternatives: int = 0
    # The parent (W3C) of the engine's spans. Without one, the engine adds no spans.
    traceparent: str = ""


class Routes(msgspec.Struct, frozen=True):
    """The experts of a mixture that computed the tokens from ``start`` on, counted from the prompt's first one.

    ``experts`` is uint8 or uint16 [tokens, layers, k]. The last sampled token was not fed to the model and is missing.
    """

    start: int
    experts: np.ndarray


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens: ``token_ids`` and ``logprobs`` have one entry per sampled token, the stop token included.

    ``versions`` covers ``[0, len(token_ids))`` in order. ``finish_reason`` is ``abort`` for an aborted request, with
    the tokens sampled by then, and for every part of a stream except the last. Only the last part may have ``routes``,
    those of prompt and answer.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionRun]
    finish_reason: FinishReason
    # Set by a pool to the engine that sampled last.
    engine: str = ""
    # Set if the engine records experts.
    routes: Routes | None = None
    # For each sampled token the likeliest ones and their log-probabilities, likeliest first, if they were asked for; of
    # a truncating sampler all that it kept.
    alternatives: list[list[tuple[int, float]]] = []


class EngineTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of tokens since the engine's start. Of ``looked_up`` prompt tokens, ``found`` were in the cache."""

    prompt: int
    sampled: int
    looked_up: int
    found: int


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load that an engine reports, over all its clients.

    ``running`` requests are being decoded. ``cache_usage`` is the used share of the KV cache, 0 to 1. Engines report
    either ``preemptions`` since the start, including those by a pause, or ``preempted``, the requests that now wait
    after one.
    """

    running: int
    waiting: int
    cache_usage: float
    preemptions: int | None = None
    preempted: int | None = None
    tokens: EngineTokens | None = None

    @property
    def requests(self) -> int:
        """The number of requests that are running or waiting."""
        return self.running + self.waiting


class Generator(Protocol):
    """A source of samples for agent loops: an engine, a pool of engines, or an engine in the loop's own process."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Sample a continuation. ``session`` names the conversation, for stickiness.

        Raises EngineRejected for a request that no engine will accept, EngineLost if none could serve it in time.
        """
        ...


class StreamingGenerator(Protocol):
    """A Generator that reports tokens while they are sampled."""

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        """Sample a continuation, as a Generator does."""
        ...


# Parses an engine's name for its weights. Raises ValueError for a name that this project did not give.
ReadVersion = Callable[[str], Version]

EMPTY = GenerateResult(token_ids=[], logprobs=[], versions=[], finish_reason="abort")


class Span(Protocol):
    """The weights named ``version`` sampled the tokens from ``start`` to ``end`` (exclusive)."""

    version: str
    start: int
    end: int


class IncomingAnswer:
    """Collects the answer to ``request`` as it arrives, in one part or in several.

    Tokens whose weight version is not yet known are held back. The embedded engine, and vLLM with our plugin, report
    versions with every part, plain vLLM only with the last one, and SGLang certainly only up to the first update.
    """

    def __init__(self, url: str, request: GenerateRequest, read_version: ReadVersion) -> None:
        self._url, self._oldest, self._read_version = url, request.min_version, read_version
        self._prompt, self._routed_from = len(request.token_ids), request.routed_from
        self._truncating = bool(request.alternatives) and request.sampling.truncating and not request.sampling.greedy
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._alternatives: list[list[tuple[int, float]]] = []
        # The number of tokens in earlier parts.
        self._returned = 0

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[list[tuple[int, float]]] = ()
    ) -> None:
        """Append sampled tokens. Raises EngineRejected unless each has one log-probability.

        Of a truncating sampler the alternatives are the kept tokens; raises EngineRejected unless they are all there.
        """
        if len(logprobs) != len(tokens):
            raise EngineRejected(f"{self._url} answered without one log-probability per sampled token")
        if self._truncating:
            alternatives = [[one for one in place if one[1] > DROPPED] for place in alternatives]
            sums = [math.fsum(math.exp(logprob) for _, logprob in place) for place in alternatives]
            if len(sums) != len(tokens) or any(abs(total - 1) > WHOLE for total in sums):
                raise EngineRejected(
                    f"{self._url} did not name all tokens that rollout.truncation kept: their probabilities sum to "
                    f"{min(sums, default=0):.4g}; vLLM needs --logprobs-mode processed_logprobs, or a "
                    "newer version; otherwise set a smaller rollout.truncation.top_k"
                )
        self._tokens += tokens
        self._logprobs += logprobs
        self._alternatives += alternatives

    def part(
        self, spans: Sequence[Span], finish_reason: FinishReason, experts: np.ndarray | None = None
    ) -> GenerateResult:
        """Return the tokens held back, given ``spans`` over all tokens so far; reason ``abort`` if more will follow.

        ``experts`` [tokens, layers, k] are those of prompt and answer from the request's ``routed_from`` on.

        Raises EngineRejected unless each token has exactly one version, or if ``experts`` has the wrong shape. Raises
        EngineLost for versions that this run did not send, and for versions older than the request's ``min_version``,
        which vLLM and SGLang do not enforce.
        """
        runs = [
            VersionRun(parse_version(self._url, span.version, self._read_version), span.start, span.end)
            for span in spans
        ]
        if [run.start for run in runs] + [len(self._tokens)] != [0] + [run.end for run in runs]:
            raise EngineRejected(f"{self._url} answered without the weight version of every token")
        if runs and (oldest := min(run.version for run in runs)) < self._oldest:
            raise EngineLost(f"{self._url} sampled with {oldest}, older than {self._oldest}")
        start, self._returned = self._returned, len(self._tokens)
        return GenerateResult(
            token_ids=self._tokens[start:],
            logprobs=self._logprobs[start:],
            versions=[VersionRun(r.version, max(r.start, start) - start, r.end - start) for r in runs if r.end > start],
            finish_reason=finish_reason,
            routes=None if experts is None else self._routes(experts),
            alternatives=self._alternatives[start:],
        )

    def _routes(self, experts: np.ndarray) -> Routes:
        most = max(0, self._prompt + len(self._tokens) - 1 - self._routed_from)
        if experts.ndim != 3 or experts.dtype not in (np.uint8, np.uint16) or len(experts) > most:
            raise EngineRejected(
                f"{self._url} answered with experts {experts.dtype}{list(experts.shape)}, not uint8 or uint16 [at most "
                f"{most} tokens, layers, experts per token]"
            )
        return Routes(self._routed_from, experts)


def parse_version(url: str, name: str, read_version: ReadVersion = Version.parse) -> Version:
    """Return the version behind an engine's name for its weights. Raises EngineLost if this run did not send it."""
    try:
        return read_version(name)
    except ValueError as error:
        raise EngineLost(f"{url} serves weights {name!r} that this run did not send") from error


def join(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    """Append ``second`` to the ``first`` part of the same answer, with the finish reason of ``second``."""
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
        # The routes of the last part cover all tokens.
        routes=second.routes or first.routes,
        alternatives=first.alternatives + second.alternatives,
    )


def continuation(request: GenerateRequest, done: GenerateResult) -> GenerateRequest:
    """Build the request for the tokens that ``done`` lacks, with the sampled tokens appended to the prompt.

    The request id changes with the prompt, so that an engine never takes it for a request that it already knows. Raises
    EngineLost if the answer must fit a JSON schema, since engines match an answer from its beginning.
    """
    if not done.token_ids:
        return request
    if request.json_schema:
        raise EngineLost(
            f"request {request.request_id}: an engine was lost after {len(done.token_ids)} tokens of an answer in a "
            "JSON format, which no other engine can continue; ask again"
        )
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}+{len(done.token_ids)}",
        token_ids=request.token_ids + done.token_ids,
        max_tokens=request.max_tokens - len(done.token_ids),
    )


class LineageFence:
    """Refuses requests of an older lineage than the newest one seen by this process.

    A successor thus fences off its predecessor with the first request of its first publication. A restarted engine has
    forgotten the newest lineage, but is not routed to until the successor has updated it.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._newest = -1
        self._named = (PROCESS_HEADER.lower().encode(), secrets.token_hex(8).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 412, or 400 for a lineage that is not a number."""

        async def named_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], self._named]}
            await send(message)

        named = dict(scope["headers"]).get(LINEAGE_HEADER.lower().encode()) if scope["type"] == "http" else None
        # Health probes need no token, so they must not be able to fence off a trainer.
        if named is None or scope["path"] == HEALTH:
            return await self._app(scope, receive, named_send)
        if not named.isdigit() or len(named) > _DIGITS:
            return await _refuse(send, 400, f"{LINEAGE_HEADER} is not a number")
        lineage = int(named)
        if lineage < self._newest:
            message = f"the trainer of lineage {lineage} was replaced by one of lineage {self._newest}"
            return await _refuse(send, REPLACED, message)
        self._newest = lineage
        await self._app(scope, receive, named_send)


async def _refuse(send: Send, status: int, reason: str) -> None:
    body, headers = answer(status, reason)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
