"""The engine's thread: pauses, sleep and weights; which models and values it refuses; the engine in process."""

import asyncio
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineLost, UserError, WeightSyncError
from rl_async.messages import Sampling
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.rollout_server.embedded.engine_thread import EngineThread, LocalEngine
from rl_async.rollout_server.embedded.server import (
    GenerateBody,
    SamplingParams,
    SequenceEvents,
    SequenceStream,
    choice,
    delta,
    load_model,
)
from rl_async.weight_sync.buckets import Piece
from tests.support.rounding import PlainPass
from tests.support.tiny_models import pickled

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
WAIT_S = 20.0


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more)).eval()


def fail(error: Exception) -> None:
    raise AssertionError("the engine's thread has failed") from error


class Request(Sequence):
    """A sequence that can be waited for."""

    def __init__(self, request_id: str = "a", max_tokens: int = 8) -> None:
        self.finished = threading.Event()
        super().__init__(
            request_id=request_id,
            tokens=[1, 2, 3],
            sampling=Sampling(),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(),
            seed=None,
            deliver=lambda _: self.finished.set(),
        )

    def wait(self) -> "Request":
        assert self.finished.wait(WAIT_S)
        return self


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    engine = EngineThread(EngineCore(llama(), max_batch=4, max_length=4096, min_iteration_s=0.001), fail)
    yield engine
    engine.stop()


def whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, tuple(tensor.shape), 0, tensor.reshape(-1))


def parameters(engine: EngineThread) -> list[Piece]:
    return [whole(name, p.detach().clone()) for name, p in engine.core.model.named_parameters()]


def test_pause_wait_ends_when_all_earlier_requests_have_finished(engine: EngineThread) -> None:
    requests = [Request(str(i), max_tokens=20) for i in range(6)]  # more than run at once
    for request in requests:
        engine.submit(request)
    engine.pause("wait").result(WAIT_S)
    assert all(request.finish_reason == "length" for request in requests)
    late = Request(max_tokens=1)
    engine.submit(late)
    assert engine.paused and not late.finished.wait(0.1)
    engine.resume().result(WAIT_S)
    assert late.wait().finish_reason == "length"


def test_resume_ends_a_waiting_pause(engine: EngineThread) -> None:
    running = Request(max_tokens=4000)
    engine.submit(running)
    waiting = engine.pause("wait")
    engine.resume().result(WAIT_S)
    waiting.result(WAIT_S)
    engine.abort(running).result(WAIT_S)
    after = Request()
    engine.submit(after)
    assert after.wait().finish_reason == "length", "the engine paused although it was resumed"


def test_abort_of_one_sequence_spares_others_of_its_id(engine: EngineThread) -> None:
    first, second = Request("same", 4000), Request("same", 20)
    engine.submit(first)
    engine.submit(second)
    assert engine.abort(first).result(WAIT_S) == 1
    assert first.wait().finish_reason == "abort"
    assert second.wait().finish_reason == "length"


def test_nothing_is_decoded_until_freed_weights_are_sent_again(engine: EngineThread) -> None:
    weights = parameters(engine)
    engine.sleep(2).result(WAIT_S)
    with pytest.raises(WeightSyncError, match="sleeps"):
        engine.load_weights(weights)
    engine.wake(["kv_cache"]).result(WAIT_S)
    assert engine.asleep
    engine.wake(["weights"]).result(WAIT_S)
    assert not engine.asleep
    request = Request()
    engine.submit(request)
    engine.load_weights(weights[:-1])
    with pytest.raises(WeightSyncError, match=weights[-1].name):
        engine.set_version("0.1").result(WAIT_S)
    assert not request.finished.wait(0.1)
    engine.load_weights(weights[-1:])
    engine.set_version("0.1").result(WAIT_S)
    assert request.wait().finish_reason == "length"


def test_weights_of_another_model_are_refused(engine: EngineThread) -> None:
    name, tensor = next(iter(engine.core.model.named_parameters()))
    with pytest.raises(WeightSyncError, match="nothing"):
        engine.load_weights([whole("nothing", tensor.detach())])
    with pytest.raises(WeightSyncError, match="shape"):
        engine.load_weights([whole(name, tensor.detach()[:1])])


def test_a_failed_thread_is_reported_and_accepts_no_more_requests() -> None:
    failures: list[Exception] = []
    core = EngineCore(llama(), max_batch=4, max_length=64)
    core.model.lm_head = None  # the next iteration fails
    failed = threading.Event()

    def crashed(error: Exception) -> None:
        failures.append(error)
        failed.set()

    engine = EngineThread(core, crashed)
    engine.submit(Request())
    assert failed.wait(WAIT_S)
    assert isinstance(failures[0], AttributeError)
    with pytest.raises(EngineLost, match="stopped"):
        engine.submit(Request())


def test_models_that_a_batch_would_change_are_refused() -> None:
    chunked = {"layer_types": ["chunked_attention"]}
    refused = {
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2)),
        "chunked_attention": Qwen2ForCausalLM(Qwen2Config(**SIZES, **chunked)),
        "final_logit_softcapping": Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, final_logit_softcapping=30.0)),
        "dynamic": llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "eager": llama(attn_implementation="eager"),
    }
    for reason, model in refused.items():
        with pytest.raises(UserError, match=rf"model\.path.*{reason}"):
            EngineCore(model, max_batch=4, max_length=64)


def test_a_missing_or_broken_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(*args: object, **more: object) -> None:
        raise OSError("no such model\nIf this is a private repository, ...")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    missing = RunConfig(
        model=ModelConfig(path=str(tmp_path / "nothing"), dtype="float32"), data=DataConfig(path="none")
    )
    with pytest.raises(UserError, match=r"model\.path.*nothing"):
        load_model(missing)
    config = RunConfig(model=ModelConfig(path=str(tmp_path), dtype="float32"), data=DataConfig(path="none"))
    with pytest.raises(UserError, match=r"model\.path") as caught:
        load_model(config)
    assert str(caught.value).endswith("no such model")
    assert "\n" not in str(caught.value)


def test_weights_that_are_pickles_are_not_read(tmp_path: Path, model_folder: Path) -> None:
    path = pickled(model_folder, tmp_path / "model")
    with pytest.raises(UserError, match=r"model\.path"):
        load_model(
            RunConfig(model=ModelConfig(path=str(path), dtype="float32", device="cpu"), data=DataConfig(path="none"))
        )


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 2**63},
        {"top_k": 2**40},
        {"top_k": -2},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"temperature": -1.0},
        {"n": 0},
        {"logprobs": 21},
        {"topp": 0.5},
    ],
    ids=str,
)
def test_sampling_values_that_would_fail_later_are_refused(params: dict[str, object]) -> None:
    body = msgspec.json.encode({"token_ids": [1], "sampling_params": params})
    with pytest.raises(msgspec.ValidationError, match="sampling_params"):
        msgspec.json.decode(body, type=GenerateBody)


def test_sampling_values_at_their_bounds_are_accepted(engine: EngineThread) -> None:
    params = SamplingParams(top_k=2**31, seed=-(2**63), max_tokens=2)
    request = Request()
    request.seed, request.sampling = params.seed, GenerateBody([1], params).sampling()
    engine.submit(request)
    assert request.wait().finish_reason == "length"


def test_a_delta_leaves_out_samples_that_are_being_appended() -> None:
    sequence = Request(max_tokens=3)
    sequence.append(7, -0.5, "0.0", 64)
    sequence.tokens.append(8)  # its log-probability is not there yet
    assert delta(sequence, 0, 1)["token_ids"] == [7]
    sequence.tokens.pop()
    sequence.append(8, -0.25, "0.1", 64)
    sequence.append(9, -0.125, "0.1", 64)
    last = choice(sequence, 1)
    assert (last["token_ids"], last["finish_reason"]) == ([8, 9], "length")
    assert last["weight_versions"] == [
        {"version": "0.0", "start": 0, "end": 1},
        {"version": "0.1", "start": 1, "end": 3},
    ]


def ask(max_tokens: int = 6) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", token_ids=[1, 2], sampling=Sampling(temperature=0.0), max_tokens=max_tokens, stop_token_ids=[]
    )


async def test_local_engine_sees_changes_of_the_model() -> None:
    model = llama()
    local = LocalEngine(model, max_batch=4, max_length=64)
    try:
        for _ in range(2):
            result = await local.generate(ask(), session="")
            ids, plain = [1, 2, *result.token_ids], PlainPass(model)
            assert result.token_ids == plain.logprobs(ids)[0][1:-1].argmax(-1).tolist()
            assert plain.errors(ids, result.logprobs).max() <= 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
    finally:
        local.close()


async def test_local_engine_reports_tokens_while_they_are_sampled() -> None:
    local, heard = LocalEngine(llama(), max_batch=4, max_length=64), list[list[int]]()
    try:
        result = await local.generate(ask(), session="", heard=lambda tokens: heard.append(list(tokens)))
    finally:
        local.close()
    assert len(heard) > 1
    assert all(result.token_ids[: len(tokens)] == tokens for tokens in heard)


async def test_local_engine_aborts_cancelled_requests() -> None:
    local = LocalEngine(llama(), max_batch=4, max_length=100_000)
    try:
        task = asyncio.create_task(local.generate(ask(max_tokens=99_000), session=""))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(WAIT_S):
            assert len((await local.generate(ask(), session="")).token_ids) == 6
        assert not local._engine.core.running
    finally:
        local.close()


# How the samples of a request go out: the head with the first part, and parts as there are more tokens.


DEADLINE_S = 60.0
Message = MutableMapping[str, Any]


class Client:
    """A client that stays connected until ``hang_up`` is set, and what it was sent."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.hang_up = asyncio.Event()
        self.events: SequenceEvents = asyncio.Queue()
        self.aborted: list[Sequence] = []
        one = Sequence("r", [1, 2], Sampling(), 3, frozenset(), seed=None, deliver=lambda _: None)
        self.sequence, self.stream = one, SequenceStream([one], self.events, self.aborted.append)

    async def receive(self) -> Message:
        await self.hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.put_nowait(message)

    def sample(self, *tokens: int) -> None:
        """Append tokens as the engine does, and say so."""
        for token in tokens:
            self.sequence.append(token, -0.5, "0.0", max_length=100)
        self.events.put_nowait(self.sequence)

    def sent(self) -> list[Message]:
        """Return what was sent since the last call."""
        return [self.messages.get_nowait() for _ in range(self.messages.qsize())]


def events(*bodies: Message) -> list[Any]:
    """Return the events in these bodies of an answer, without the mark of its end."""
    lines = b"".join(body["body"] for body in bodies).split(b"\n\n")
    return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]


async def test_a_short_answer_goes_out_whole_with_its_length() -> None:
    client = Client()
    client.sample(5, 6, 7)
    async with asyncio.timeout(DEADLINE_S):
        await client.stream({}, client.receive, client.send)
    head, body = client.sent()
    assert head["status"] == 200 and dict(head["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert not body["more_body"] and body["body"].endswith(b"data: [DONE]\n\n")
    (event,) = events(body)
    assert event["choices"][0]["token_ids"] == [5, 6, 7] and event["choices"][0]["finish_reason"] == "length"


async def test_the_head_waits_for_the_first_part_and_has_no_length_if_more_will_follow() -> None:
    client = Client()
    answering = asyncio.ensure_future(client.stream({}, client.receive, client.send))
    async with asyncio.timeout(DEADLINE_S):
        client.events.put_nowait(client.sequence)  # nothing was sampled yet
        for _ in range(5):
            await asyncio.sleep(0)
        assert client.events.empty() and client.sent() == []
        client.sample(5)
        head, part = await client.messages.get(), await client.messages.get()
        assert b"content-length" not in dict(head["headers"]) and part["more_body"]
        client.sample(6, 7)
        await answering
    (last,) = client.sent()
    assert not last["more_body"] and last["body"].endswith(b"data: [DONE]\n\n")
    assert [event["choices"][0]["token_ids"] for event in events(part, last)] == [[5], [6, 7]]
    assert client.aborted == []


async def test_what_cannot_go_on_is_an_error_with_status_200_as_in_vllm() -> None:
    client = Client()
    client.sequence.stuck = "no token is allowed"
    client.sample(0)
    async with asyncio.timeout(DEADLINE_S):
        await client.stream({}, client.receive, client.send)
    head, body = client.sent()
    assert head["status"] == 200 and not body["more_body"]
    assert events(body)[0]["error"]["code"] == 400


async def test_a_client_that_hangs_up_before_the_first_part_stops_its_sequences() -> None:
    client = Client()
    client.hang_up.set()
    async with asyncio.timeout(DEADLINE_S):
        await client.stream({}, client.receive, client.send)
    assert client.aborted == [client.sequence] and client.sent() == []
