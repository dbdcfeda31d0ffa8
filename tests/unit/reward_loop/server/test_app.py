"""The reward model's routes, called without a socket."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rl_async import tracing
from rl_async.concurrency import SHORT
from rl_async.process.http_server import BODY_BYTES
from rl_async.reward_loop.server.app import MOST_SEQUENCES, Application, Batcher


class HeldTokenizer:
    """Gives one token for each text, once the test lets it."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        self.began.set()
        assert self.go.wait(60), "nothing else happened meanwhile"
        return {"input_ids": [0]}


def application(tokenizer: Any) -> Application:
    batcher = Batcher(lambda rows: [1.0 for _ in rows], 4)
    return Application(batcher, tokenizer, name="m", label=None, vocabulary=8, longest=None)


async def call(
    served: Application, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, bytes]:
    sent: list[Any] = []
    asked = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(asked, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "http_version": "1.1"}
    scope |= {"headers": list(headers)}
    await served.app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def body(given: Any) -> bytes:
    return msgspec.json.encode({"input": given})


async def test_health_probes_are_answered_while_a_long_text_is_tokenised() -> None:
    tokenizer = HeldTokenizer()
    served = application(tokenizer)
    async with served.app.router.lifespan_context(served.app):
        scoring = asyncio.create_task(call(served, "POST", "/classify", body("a" * SHORT)))
        assert await asyncio.to_thread(tokenizer.began.wait, 60)
        assert (await call(served, "GET", "/health"))[0] == 200
        assert not scoring.done()
        tokenizer.go.set()
        assert (await scoring)[0] == 200


async def test_bodies_and_sequences_beyond_the_limits_are_refused() -> None:
    served = application(HeldTokenizer())
    assert (await call(served, "POST", "/classify", b" " * (BODY_BYTES + 1)))[0] == 413
    status, answer = await call(served, "POST", "/classify", body([[1]] * (MOST_SEQUENCES + 1)))
    assert status == 400 and str(MOST_SEQUENCES) in answer.decode()
    assert (await call(served, "POST", "/classify", b'{"input": ' + b"[" * 100_000))[0] == 400


async def test_a_request_that_names_a_span_gets_one_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[str, str, Any]] = []
    spans = SimpleNamespace(add_below=lambda above, name, times, error, about: added.append((above, name, about)))
    monkeypatch.setattr(tracing, "_spans", spans)
    tokenizer = HeldTokenizer()
    tokenizer.go.set()
    served = application(tokenizer)
    async with served.app.router.lifespan_context(served.app):
        for headers in ([], [(tracing.HEADER.encode(), b"above")]):
            assert (await call(served, "POST", "/classify", body(["a", "b"]), headers))[0] == 200
    assert added == [("above", "classify", {"gen_ai.usage.input_tokens": 2, "rl_async.rows": 2})]
