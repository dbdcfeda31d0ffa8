"""The reward model's server: ``/classify`` in vLLM's dialect (its documentation, v0.16), and ``/health``.

Requests that arrive while the model is busy are collected into its next batch. ``serve`` loads the model and serves it
until SIGTERM.
"""

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from prometheus_client.core import CounterMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rl_async import tracing
from rl_async.concurrency import gather_or_cancel, off_loop
from rl_async.errors import UserError
from rl_async.files import UNDECODABLE
from rl_async.model_files import read_object
from rl_async.process.http_auth import Access
from rl_async.process.http_server import application, gauge, metrics_text, read_body, server_of, text_response
from rl_async.process.role import bind
from rl_async.reward_loop.scorers.reward_model import load_tokenizer
from rl_async.torch_shared import pick_device

SUFFIX = "ForSequenceClassification"


def load_classifier(path: str, dtype: str, device: str) -> torch.nn.Module:
    """Load the classifier in ``path`` for inference; the ``device`` "auto" prefers a GPU.

    Raises UserError if it is not a sequence classifier with one label: a causal LM would load, with a random head.
    """
    config = _read_config(Path(path))
    architectures = config.get("architectures") or []
    if not any(name.endswith(SUFFIX) for name in architectures):
        raise UserError(
            f"reward model: {path} holds {', '.join(architectures) or 'no architecture'}, not a sequence classifier; "
            "`rl-async reward-model` trains one"
        )
    try:
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        # Transformers adds paragraphs of advice.
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"reward model: cannot load {path}: {reason}") from error
    if model.config.num_labels != 1:
        raise UserError(f"reward model: {path} has {model.config.num_labels} labels; a reward needs one (num_labels=1)")
    return model.to(pick_device(device)).eval()


def _read_config(path: Path) -> dict[str, Any]:
    # Transformers would look for a missing folder on the Hub.
    if not path.is_dir():
        raise UserError(f"reward model: there is no folder {path}")
    try:
        return read_object(path / "config.json", "reward model")
    except OSError as error:
        raise UserError(f"reward model: {path}/config.json cannot be read: {error}") from error


def longest(model: Any) -> int | None:
    """Return the model's number of positions, which bounds a sequence's tokens, or None if unknown."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def values(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the classifier's output for each of N token sequences, float32 [N], with gradients if they are on.

    A decoder's output is taken at the last token that is not padding, and many tokenizers pad with the token that ends
    a turn. So rows are padded on the right with a token that ends none of them.
    """
    ends = {row[-1] for row in rows}
    text_config = model.config.get_text_config()
    candidates = (text_config.pad_token_id, *range(len(rows) + 1))
    padding = next(token for token in candidates if token is not None and token not in ends)
    text_config.pad_token_id = padding
    width = max(len(row) for row in rows)
    tokens = torch.full((len(rows), width), padding)
    attended = torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        attended[i, : len(row)] = 1
    device = next(model.parameters()).device
    logits = model(input_ids=tokens.to(device), attention_mask=attended.to(device)).logits
    return logits[:, 0].float()


@torch.inference_mode()
def score(model: Any, rows: Sequence[Sequence[int]]) -> list[float]:
    """Return ``values`` as floats, without gradients."""
    return [float(value) for value in values(model, rows)]


log = logging.getLogger("rl_async.reward_model")

Scoring = Callable[[Sequence[Sequence[int]]], list[float]]
Waiting = tuple[Sequence[int], "asyncio.Future[float]"]


class Batcher:
    """Calls ``scoring`` in a thread, with up to ``batch_size`` rows at a time."""

    def __init__(self, scoring: Scoring, batch_size: int) -> None:
        self._scoring, self._batch_size = scoring, batch_size
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        # Totals for the metrics: rows and batches scored, and seconds spent on them.
        self.rows = self.batches = 0
        self.seconds = 0.0

    @property
    def waiting(self) -> int:
        """Rows that wait for a batch."""
        return self._waiting.qsize()

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return a number for each row once it was scored. Has no deadline: the process ends if ``run`` fails."""
        futures = [asyncio.get_running_loop().create_future() for _ in rows]
        for waiting in zip(rows, futures):
            self._waiting.put_nowait(waiting)
        return await gather_or_cancel(*futures)

    async def run(self) -> None:
        """Consumes rows; produces their numbers. Waits for the next row; runs until cancelled or ``scoring`` raises."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._batch_size and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # A future that is done belongs to a client that disconnected.
            batch = [waiting for waiting in batch if not waiting[1].done()]
            if not batch:
                continue
            began = time.perf_counter()
            numbers = await asyncio.to_thread(self._scoring, [row for row, _ in batch])
            self.seconds += time.perf_counter() - began
            self.rows += len(batch)
            self.batches += 1
            for (_, future), number in zip(batch, numbers):
                if not future.done():
                    future.set_result(number)


# A request may have so many sequences.
MOST_SEQUENCES = 4096


class ClassifyBody(msgspec.Struct):
    """``input`` is a text, a list of texts, the token ids of one sequence, or a list of such lists.

    ``add_special_tokens`` applies to texts.
    """

    input: str | list[str | int | list[int]]
    model: str = ""
    use_activation: bool = True
    add_special_tokens: bool = True


class Item(msgspec.Struct):
    index: int
    probs: list[float]
    label: str | None
    num_classes: int = 1


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Classified(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Item]
    usage: Usage


class BatcherCollector:
    """Counts the work of the reward model for Prometheus."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        batcher = self._batcher
        yield gauge("rl_async_reward_model_waiting", "Sequences that wait for a batch.", batcher.waiting)
        yield CounterMetricFamily("rl_async_reward_model_rows", "Sequences scored.", batcher.rows)
        yield CounterMetricFamily("rl_async_reward_model_batches", "Batches scored.", batcher.batches)
        yield CounterMetricFamily("rl_async_reward_model_busy_seconds", "Time spent on batches.", batcher.seconds)


class Application:
    """The routes of one model; ``app`` is the ASGI application. Sequences may have ``longest`` tokens, if not None."""

    def __init__(
        self,
        batcher: Batcher,
        tokenizer: PreTrainedTokenizerFast,
        *,
        name: str,
        label: str | None,
        vocabulary: int,
        longest: int | None,
    ) -> None:
        self._batcher, self._tokenizer, self._name, self._label = batcher, tokenizer, name, label
        self._vocabulary, self._longest = vocabulary, longest
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._metrics_text = metrics_text(BatcherCollector(batcher))
        routes = {"POST /classify": self.classify, "GET /health": self.health, "GET /metrics": self.metrics}
        self.app = application(routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        batches = asyncio.create_task(self._batcher.run(), name="batches")
        batches.add_done_callback(_end_with)
        try:
            yield
        finally:
            batches.cancel()

    async def health(self, request: Request) -> Response:
        """Answer 200, which is possible only once the model is loaded."""
        return Response()

    async def metrics(self, request: Request) -> Response:
        """Answer Prometheus."""
        return text_response(self._metrics_text())

    async def classify(self, request: Request) -> Response:
        """Answer with a number per sequence; with status 400 if the input cannot be scored."""
        began = tracing.now()
        try:
            received = await read_body(request)
            body, rows = await off_loop(len(received), self._read, received)
        except (*UNDECODABLE, ValueError) as error:
            return _error(400, str(error))
        numbers = await self._batcher.score(rows)
        if not all(map(math.isfinite, numbers)):
            return _error(500, f"the model returned {numbers}, which are not all finite")
        if body.use_activation:
            # The logistic function, without overflow.
            numbers = [0.5 * (1.0 + math.tanh(0.5 * number)) for number in numbers]
        tokens = sum(map(len, rows))
        about: dict[str, tracing.Value] = {"gen_ai.usage.input_tokens": tokens, "rl_async.rows": len(rows)}
        tracing.add_below(request.headers.get(tracing.HEADER, ""), "classify", began, tracing.now(), about)
        answer = Classified(
            id=f"classify-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._name,
            data=[Item(i, [number], self._label) for i, number in enumerate(numbers)],
            usage=Usage(tokens, tokens),
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    def _read(self, received: bytes) -> tuple[ClassifyBody, list[list[int]]]:
        """Decode and tokenise, in any thread. Raises DecodeError or ValueError for input that cannot be scored."""
        body = msgspec.json.decode(received, type=ClassifyBody)
        given: Sequence[Any] = [body.input] if isinstance(body.input, str) else body.input
        if given and all(isinstance(part, int) for part in given):
            given = [given]
        if len(given) > MOST_SEQUENCES:
            raise ValueError(f"input: {len(given)} sequences; a request may have {MOST_SEQUENCES}")
        rows = [self._encode(part, body.add_special_tokens) for part in given]
        if not rows:
            raise ValueError("input: it is empty")
        for row in rows:
            if not row:
                raise ValueError("input: a sequence has no tokens")
            if self._longest is not None and len(row) > self._longest:
                raise ValueError(f"input: a sequence has {len(row)} tokens; the model takes at most {self._longest}")
            if not 0 <= min(row) <= max(row) < self._vocabulary:
                raise ValueError(f"input: token ids must be from 0 to {self._vocabulary - 1}")
        return body, rows

    def _encode(self, part: str | int | list[int], special: bool) -> list[int]:
        if isinstance(part, str):
            # Encoding a text that must be too long would only take time.
            if self._longest is not None and len(part) > self._longest * self._longest_token:
                raise ValueError(f"input: a text of {len(part)} characters; the model takes {self._longest} tokens")
            return list(self._tokenizer(part, add_special_tokens=special)["input_ids"])
        if isinstance(part, int):
            raise ValueError("input: token ids and texts are mixed")
        return part


def _error(status: int, message: str) -> Response:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    body = {"error": {"message": message, "type": kind, "code": status}}
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _end_with(batches: "asyncio.Task[None]") -> None:
    """End the process after an error of the model, so that it is restarted and no client waits for an answer."""
    if not batches.cancelled():
        log.critical("the reward model failed", exc_info=batches.exception())
        os._exit(1)


def serve(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM. Raises UserError without a token, if the model cannot be loaded, or if the port is taken."""
    # SIGTERM also ends the loading of the model. uvicorn takes the signal over while it serves and raises it again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    access = Access.from_environment()
    torch.set_num_threads(arguments.threads)
    listener = bind(arguments.host, arguments.port, "reward model")
    model: Any = load_classifier(arguments.model, arguments.dtype, arguments.device)
    served = Application(
        Batcher(lambda rows: score(model, rows), arguments.batch_size),
        load_tokenizer(arguments.model, "reward model"),
        name=arguments.model,
        label=(model.config.id2label or {}).get(0),
        vocabulary=model.config.get_text_config().vocab_size,
        longest=longest(model),
    )
    with tracing.traced("", None, "reward-model"):
        # Clients keep an unused connection for less than these 60 seconds.
        server_of(served.app, access, lifespan="on", timeout_keep_alive=60).run(sockets=[listener])
