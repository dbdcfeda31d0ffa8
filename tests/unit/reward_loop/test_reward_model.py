"""The client of a reward model: what it sends, and answers that are no reward."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rl_async import tracing
from rl_async.agent_loop.telemetry import of_reward
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.concurrency import SHORT
from rl_async.configs.schema.reward import RewardConfig, RewardModelConfig, RewardTerm
from rl_async.process.http_auth import make_tokens, run_token
from rl_async.process.http_server import BODY_BYTES
from rl_async.reward_loop.scorers.reward_model import ConversationEncoder, load_tokenizer
from rl_async.reward_loop.server.app import MOST_SEQUENCES, Application, Batcher
from rl_async.reward_loop.service import RewardService
from tests.unit.reward_loop.outside import DEEP, Answer, Outside, score, task, trajectory

TERMS = (RewardTerm(name="reward_model", weight=2.0),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([[{"role": "user", "content": "?"}]], 100).save_pretrained(path)
    return str(path)


def classified(*probs: Any) -> Answer:
    return Answer({"data": [{"index": 0, "label": None, "num_classes": len(probs), "probs": list(probs)}]})


async def test_the_whole_conversation_is_sent_and_the_raw_output_is_the_reward(folder: str) -> None:
    async with Outside(Answer("loading", 503), classified(-3.5)) as server:
        model = RewardModelConfig(path=folder, url=server.url, name="org/rm")
        async with RewardService(RewardConfig(functions=TERMS, model=model)) as service:
            row = await score(service, "42")
    assert (row.reward, row.reward_parts, row.error) == (-7.0, {"reward_model": -3.5}, "")
    said = [("user", "?"), ("assistant", "call"), ("tool", "1"), ("assistant", "42")]
    messages = [{"role": role, "content": text} for role, text in said]
    ids = ConversationEncoder(load_tokenizer(folder, "test")).ids(messages)
    assert server.asked[1].body == {"model": "org/rm", "input": ids, "use_activation": False}
    assert server.asked[1].authorization is None


async def test_the_runs_own_server_gets_the_runs_token_and_another_its_own_key(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokens(tmp_path / "keys")
    monkeypatch.setenv("RM_KEY", "of-another-server")
    async with Outside(classified(1.0)) as server:
        own = RewardModelConfig(path=folder)
        outside = RewardModelConfig(path=folder, url=server.url, api_key_env="RM_KEY")
        for model in (own, outside):
            config = RewardConfig(functions=TERMS, model=model)
            async with RewardService(config, model_url=server.url, folder=tmp_path) as service:
                await score(service, "42")
    sent = [asked.authorization for asked in server.asked]
    assert sent == [f"Bearer {run_token(tmp_path, 'engines')}", "Bearer of-another-server"]


async def test_the_runs_own_server_alone_is_told_of_the_span_above(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokens(tmp_path / "keys")
    spans = SimpleNamespace(traceparent=lambda episode, key: f"of {episode} {key}", add=lambda *_: None)
    monkeypatch.setattr(tracing, "_spans", spans)
    async with Outside(classified(1.0)) as server:
        for model in (RewardModelConfig(path=folder), RewardModelConfig(path=folder, url=server.url)):
            config = RewardConfig(functions=TERMS, model=model)
            async with RewardService(config, model_url=server.url, folder=tmp_path) as service:
                for trace in ("3.1.0", ""):
                    with of_reward(trace, SimpleNamespace(scored=True, reward=0.0, role="")):  # type: ignore[arg-type]
                        await score(service, "42")
    assert [asked.traceparent for asked in server.asked] == ["of 3.1.0 reward", None, None, None]
    assert tracing.above() == ""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (classified(0.1, 0.9), "has the model one label?"),
        (classified(), "has the model one label?"),
        (classified(None), "classification"),
        (Answer({"data": []}), "has the model one label?"),
        (Answer("<html>"), "classification"),
        (Answer(DEEP), "classification"),
        (Answer(None), "did not answer within 0.2 s (reward.model.timeout_s)"),
    ],
)
async def test_answers_that_are_no_reward_mark_the_trajectory(folder: str, answer: Answer, said: str) -> None:
    async with Outside(answer) as server:
        model = RewardModelConfig(path=folder, timeout_s=0.2 if answer.body is None else 20.0)
        config = RewardConfig(functions=TERMS, model=model)
        make_tokens(Path(folder) / "keys")
        async with RewardService(config, model_url=server.url, folder=Path(folder)) as service:
            row = await score(service, "42")
    assert not row.scored and row.reward == 0.0
    assert row.error.startswith("reward reward_model: ") and said in row.error


async def test_with_steps_a_turn_is_worth_what_it_adds_to_the_score(folder: str) -> None:
    encoder = ConversationEncoder(load_tokenizer(folder, "test"))
    called = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "call"}]

    def judged(body: dict[str, Any]) -> Answer:
        return classified(0.75 if body["input"] == encoder.ids(called) else 0.5)

    async with Outside(judged, judged) as server:
        config = RewardConfig(functions=TERMS, model=RewardModelConfig(path=folder, url=server.url, steps=True))
        async with RewardService(config) as service:
            row = await score(service, "42")
            assert len(server.asked) == 2
            single = await score(service, "42", turns=[row.turns[0], row.turns[1]])
    first, last = (turn for turn in row.turns if turn.role == "assistant")
    assert (first.reward, last.reward, row.reward) == (1.5, None, -0.5)
    assert row.reward_parts == {"reward_model": 0.5}
    assert single.reward == 1.5 and len(server.asked) == 3


async def test_an_episode_of_several_rows_has_its_score_at_its_end(folder: str) -> None:
    async with Outside(classified(0.25), classified(0.5)) as server:
        config = RewardConfig(functions=TERMS, model=RewardModelConfig(path=folder, url=server.url, steps=True))
        async with RewardService(config) as service:
            row, other = trajectory("42"), trajectory("42")
            await service.score(task(), row, other)
    assert not any(turn.reward for turn in row.turns + other.turns)
    assert row.reward == other.reward


# The reward model's routes, called without a socket.


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
