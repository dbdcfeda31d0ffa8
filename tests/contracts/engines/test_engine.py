"""What every engine must do, over HTTP: the embedded engine and real vLLM, which speak one dialect."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.errors import EngineLost, EngineRejected, TrainerReplaced
from rl_async.launcher.cli.engine_verification import verify
from rl_async.messages import Sampling, Version, VersionRun
from rl_async.process.http_auth import bearer
from rl_async.rollout_server.api import MOST_ALTERNATIVES, GenerateRequest, GenerateResult
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.trainer.packing import Tensors
from rl_async.trainer.teacher import TeacherEndpoint, check_tokenizers
from rl_async.weight_sync.buckets import Bucket, adapter_buckets, as_adapters, deltas, numbered
from rl_async.weight_sync.protocol import Hold, InitInfo, UpdateInfo
from rl_async.weight_sync.transports import SharedMemorySender
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import (
    ATTEMPTS,
    MAX_LENGTH,
    Peer,
    deliver,
    differences,
    errors,
    log_probabilities,
    metric,
    paused,
    running,
    sampling,
    scaled,
    send,
    tensors,
)
from tests.support.rounding import PlainPass
from tests.support.weights import adapters, make_buckets, merged

V0, V1 = Version(0, 0), Version(0, 1)
WAIT_S = 60.0  # at most, for what must happen
# Tokens; sampling them takes long enough that something can happen meanwhile.
LONG = 700


# vLLM that counts the versions of tokens by itself, and with its own versions hidden, so that the plugin counts them.
KINDS = [
    "embedded",
    pytest.param("embedded:static", marks=pytest.mark.slow),
    pytest.param("vllm", marks=pytest.mark.slow),
    pytest.param("vllm:counted", marks=pytest.mark.nightly),
]
WITHOUT_VERSIONS = Path(__file__).parents[2] / "support" / "vllm_without_versions"


@pytest.fixture(scope="module", params=KINDS)
def peer(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    """A running engine of each kind."""
    # The engine of test_several_ranks.py compiles. Not forked: a test looks at its command line and its environment.
    kind, _, way = request.param.partition(":")
    with pytest.MonkeyPatch.context() as patch:
        if way == "counted":
            patch.setenv("PYTHONPATH", str(WITHOUT_VERSIONS))
        flags = ("--decode=static",) if way == "static" else ()
        folder = tmp_path_factory.mktemp("run")
        with running(kind, model_folder, folder, eager=True, forked=False, flags=flags) as started:
            yield started


@pytest.fixture
async def engine(connect: Connect, model_folder: Path) -> VllmEngine:
    """A client; the engine serves the folder's weights as version 0.0."""
    client = connect()
    await send(client, tensors(model_folder), V0)
    return client


def ask(tokens: int = 8, max_tokens: int = 16, **more: Any) -> GenerateRequest:
    settings = {"sampling": Sampling(), "stop_token_ids": [], "min_version": V0} | more
    ids = [(7 * i + 3) % 60 for i in range(tokens)]
    return GenerateRequest(request_id=secrets.token_hex(4), token_ids=ids, max_tokens=max_tokens, **settings)


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    """log-softmax [T, V] of a plain forward pass."""
    return log_probabilities(scaled(folder), ids)


def difference(folder: Path, request: GenerateRequest, got: GenerateResult, scale: float = 1.0) -> torch.Tensor:
    """|engine - plain forward| per sampled token."""
    return differences(scaled(folder, scale), request, got)


def error(folder: Path, request: GenerateRequest, got: GenerateResult, scale: float = 1.0) -> torch.Tensor:
    """Errors of the engine's log-probabilities, as multiples of what rounding explains."""
    return errors(scaled(folder, scale), request, got)


async def test_logprobs_agree_with_a_plain_forward_pass(engine: VllmEngine, model_folder: Path) -> None:
    requests = [ask(tokens=3 + i, max_tokens=5 + i) for i in range(20)]  # more than fit into a batch
    answers = await asyncio.gather(*(engine.generate(r) for r in requests))
    for request, got in zip(requests, answers, strict=True):
        assert len(got.token_ids) == len(got.logprobs) == request.max_tokens
        assert got.finish_reason == "length"
        assert got.versions == [VersionRun(V0, 0, request.max_tokens)]
        assert error(model_folder, request, got).max() <= 1


async def test_samples_of_one_prompt_are_coalesced(connect: Connect, engine: VllmEngine, model_folder: Path) -> None:
    client = connect(max_coalesced=8)
    requests = [ask(max_tokens=40) for _ in range(6)]
    answers = await asyncio.gather(*(client.generate(r) for r in requests))
    for request, got in zip(requests, answers, strict=True):
        assert len(got.token_ids) == 40 and got.versions == [VersionRun(V0, 0, 40)]
        assert error(model_folder, request, got).max() <= 1
    assert len({tuple(got.token_ids) for got in answers}) == 6, "the samples are equal"
    likeliest = [ask(sampling=Sampling(temperature=0.0)) for _ in range(2)]
    assert len({tuple(got.token_ids) for got in await asyncio.gather(*map(client.generate, likeliest))}) == 1
    async with sampling(client, *(ask(max_tokens=LONG) for _ in range(3))) as tasks:
        tasks[0].cancel()
        assert [len((await task).token_ids) for task in tasks[1:]] == [LONG, LONG]
    async with sampling(client, *(ask(max_tokens=LONG) for _ in range(3))) as tasks:
        for task in tasks:
            task.cancel()
    for _ in range(200):
        if (load := await engine.load()).requests == 0:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the engine decodes on for callers that left")
    assert load.tokens is not None and load.preemptions is not None, "a metric has another name in this engine"
    assert load.tokens.prompt >= 8 and load.tokens.sampled > 2 * LONG and load.tokens.looked_up > 0


async def test_the_load_shows_what_is_sampled_now(engine: VllmEngine) -> None:
    assert (await engine.load()).requests == 0
    for _ in range(ATTEMPTS):
        async with sampling(engine, ask(max_tokens=LONG)):
            busy = await engine.load()
        if busy.running:  # else the answer was over by then
            break
    assert busy.running == 1 and busy.cache_usage > 0


async def test_it_is_verified_against_its_own_weights_and_no_others(
    peer: Peer, engine: VllmEngine, model_folder: Path
) -> None:
    _, allowed = PlainPass(scaled(model_folder)).logprobs(list(range(40)))
    # The plain pass that the engine is compared with rounds, too.
    found = await asyncio.to_thread(verify, engine.url, model_folder, 12, 2 * allowed, token=peer.token)
    assert found.ok and found.tokens == 12 * 32 and str(12 * 32) in found.text()
    await send(engine, tensors(model_folder, 1.5), V1)
    found = await asyncio.to_thread(verify, engine.url, model_folder, 4, 1e-2, token=peer.token)
    assert not found.ok and "--tolerance" in found.text(), "not taken for the fault that --logprobs-mode mends"


async def test_a_truncating_sampler_names_what_it_kept(engine: VllmEngine, model_folder: Path) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.8, top_k=5)
    request = ask(sampling=sampling, alternatives=MOST_ALTERNATIVES)
    got = await engine.generate(request)
    logits = reference(model_folder, request.token_ids + got.token_ids)[len(request.token_ids) - 1 : -1].double() / 0.7
    assert len(got.alternatives) == len(got.token_ids) == 16
    for z, token, logprob, place in zip(logits, got.token_ids, got.logprobs, got.alternatives, strict=True):
        kept = [each for each, _ in place]
        assert token in kept and 1 <= len(kept) <= 5 and {*kept} <= {*z.topk(5).indices.tolist()}
        over_them = z - z[kept].logsumexp(0)
        assert logprob == pytest.approx(over_them[token].item(), abs=1e-3)


async def test_greedy_and_stop_tokens(engine: VllmEngine, model_folder: Path) -> None:
    request = ask(sampling=Sampling(temperature=0.0))
    got = await engine.generate(request)
    logits = reference(model_folder, request.token_ids + got.token_ids)
    assert got.token_ids == logits[len(request.token_ids) - 1 : -1].argmax(-1).tolist()
    stop = got.token_ids[4]
    again = await engine.generate(ask(sampling=Sampling(temperature=0.0), stop_token_ids=[stop]))
    assert again.token_ids == got.token_ids[: got.token_ids.index(stop) + 1]
    assert again.finish_reason == "stop"


async def test_the_likeliest_tokens_in_each_place_are_told(engine: VllmEngine, model_folder: Path) -> None:
    request = ask(max_tokens=4, alternatives=3, sampling=Sampling(temperature=0.7))
    got = await engine.generate(request)
    rows = torch.log_softmax(
        reference(model_folder, request.token_ids + got.token_ids)[len(request.token_ids) - 1 : -1].double() / 0.7, -1
    )
    assert len(got.alternatives) == len(got.token_ids)
    for row, place in zip(rows, got.alternatives, strict=True):
        likeliest = row.topk(3)
        # vLLM names the sampled token in place of the last one.
        assert [token for token, _ in place][:2] == likeliest.indices.tolist()[: len(place)][:2]
        assert [logprob for _, logprob in place][:2] == pytest.approx(likeliest.values.tolist()[:2], abs=1e-3)
    assert not (await engine.generate(ask())).alternatives


async def test_requests_in_flight_go_on_with_the_new_weights(engine: VllmEngine, model_folder: Path) -> None:
    weights = tensors(model_folder, 1.5)
    requests = [ask(max_tokens=LONG) for _ in range(4)]
    async with paused(engine, *requests) as tasks:
        await send(engine, weights, V1)
    for request, task in zip(requests, tasks, strict=True):
        got = await task
        assert [run.version for run in got.versions] == [V0, V1], "the update came too late or too early"
        boundary = got.versions[1].start
        assert len(got.token_ids) == LONG
        assert error(model_folder, request, got)[:boundary].max() <= 1
        assert error(model_folder, request, got, 1.5)[boundary:].max() <= 1
        assert difference(model_folder, request, got)[boundary:].max() > 1e-3, "the weights did not change"


async def held(client: VllmEngine, buckets: list[Bucket], version: Version, hold: Hold) -> None:
    """An update that the engine keeps a copy of; with ``stage`` it decodes until it loads."""
    await client.init_transfer(InitInfo(backend="ipc"))
    if hold == "keep":
        await client.pause("keep")
    await client.start_update(hold == "stage")
    sender = SharedMemorySender()
    for bucket in buckets:
        await client.update(sender.stage(bucket))
    sender.close()
    if hold == "stage":
        assert (await client.generate(ask(max_tokens=2))).versions == [VersionRun(V0, 0, 2)]
        await client.pause("keep")
    await client.finish_update(version)
    await client.resume()


@pytest.mark.parametrize("hold", ["keep", "stage"])
async def test_deltas_and_staged_updates_end_in_the_same_weights(
    engine: VllmEngine, model_folder: Path, hold: Hold
) -> None:
    weights = tensors(model_folder)
    changed = [(name, tensor.clone()) for name, tensor in weights]
    for _, tensor in changed:
        tensor.view(-1)[::50] *= 1.5
    old, new = (list(numbered(list(make_buckets(w, 1 << 12)), v, hold)) for w, v in ((weights, V0), (changed, V1)))
    await held(engine, old, V0, hold)
    sent = list(deltas(new, old, str(V0)))
    assert sum(bucket.nbytes for bucket in sent) < sum(bucket.nbytes for bucket in new) / 5
    await held(engine, sent, V1, hold)
    got = await engine.generate(ask(min_version=V1))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.load_state_dict(dict(changed), strict=False)
    assert errors(model, ask(), got).max() <= 1
    await engine.pause("keep")
    await engine.start_update()
    sender = SharedMemorySender()
    with pytest.raises(EngineLost, match=r"0\.0.*0\.1"):
        await engine.update(sender.stage(sent[0]))
    sender.close()
    await send(engine, weights, V0)


async def test_adapters_alone_end_in_the_bits_of_merged_weights(engine: VllmEngine, model_folder: Path) -> None:
    base, weights = make_buckets(tensors(model_folder), 1 << 12), tensors(model_folder)
    for step in (1, 2):
        named, version = adapters(weights, ("k_proj", "down_proj"), seed=step), Version(0, step)  # k_proj vLLM fuses
        expected = merged(weights, named, 1.7)
        await send(engine, expected, version)
        sums = await engine.checksums()
        await send(engine, tensors(model_folder, 1.5), V0)  # kept by no engine, and forgotten in its sleep
        assert await engine.checksums() != sums
        sent = numbered([*base, *as_adapters(make_buckets(named.items(), 1 << 12), 1.7)], version, "no")
        await engine.pause("keep")
        await engine.sleep(2)
        await engine.wake(["weights"])
        await deliver(engine, sent if step == 1 else adapter_buckets(sent), version)
        await engine.wake(["kv_cache"])
        await engine.resume()
        assert await engine.checksums() == sums
        model, request = scaled(model_folder), ask(min_version=version)
        model.load_state_dict(dict(expected), strict=False)
        assert errors(model, request, await engine.generate(request)).max() <= 1


async def test_adapters_for_another_base_are_refused_and_an_update_with_theirs_is_taken(
    engine: VllmEngine, model_folder: Path
) -> None:
    named, sums = adapters(tensors(model_folder), ("q_proj",), seed=1), []
    for scale in (1.0, 1.5):
        base = make_buckets(tensors(model_folder, scale), 1 << 12)
        sent = numbered([*base, *as_adapters(make_buckets(named.items(), 1 << 12), 2.0)], V1, "no")
        await engine.pause("keep")
        if scale == 1.5:
            with pytest.raises(EngineLost, match=rf"{sent[-1].info.base}.*base-\w+"):
                await deliver(engine, adapter_buckets(sent), V1)
        await deliver(engine, sent, V1)
        await engine.resume()
        sums.append(await engine.checksums())
    assert sums[0] != sums[1]


async def test_the_version_gate(engine: VllmEngine) -> None:
    with pytest.raises(EngineLost, match=str(V1)):
        await engine.generate(ask(min_version=V1))
    assert await engine.version() == V0


async def test_checksums_follow_the_weights(engine: VllmEngine, model_folder: Path) -> None:
    before = await engine.checksums()
    await send(engine, tensors(model_folder, 1.5), V1)
    after = await engine.checksums()
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {name for name in before if "norm" not in name}
    await send(engine, tensors(model_folder), V0)
    assert await engine.checksums() == before


async def test_a_failed_update_can_be_started_again(engine: VllmEngine, model_folder: Path) -> None:
    buckets = list(make_buckets(tensors(model_folder, 3.0), 1 << 12))
    half = len(buckets) // 2
    sender = SharedMemorySender()
    await engine.init_transfer(InitInfo(backend="ipc"))
    await engine.pause("keep")
    await engine.start_update()
    for bucket in buckets[:half]:
        await engine.update(sender.stage(bucket))
    bucket = buckets[half]
    with pytest.raises(EngineLost, match="checksum"):
        await engine.update(msgspec.structs.replace(sender.stage(bucket), checksum="wrong"))
    sender.close()
    await send(engine, tensors(model_folder, 1.5), V1)
    request = ask(min_version=V1)
    assert error(model_folder, request, await engine.generate(request), 1.5).max() <= 1


async def test_an_unfinished_update_is_forgotten(engine: VllmEngine, model_folder: Path) -> None:
    weights = [(name, tensor) for name, tensor in tensors(model_folder, 3.0) if "gate_proj" in name or "q_proj" in name]
    (bucket,) = make_buckets(weights, 1 << 20)  # parts of what vLLM fuses
    sender = SharedMemorySender()
    await engine.init_transfer(InitInfo(backend="ipc"))
    await engine.pause("keep")
    await engine.start_update()
    await engine.update(sender.stage(bucket))  # and then the trainer dies
    sender.close()
    await send(engine, tensors(model_folder, 1.5), V1)
    request = ask(min_version=V1)
    assert error(model_folder, request, await engine.generate(request), 1.5).max() <= 1


async def test_pause_keep_holds_requests_and_new_ones_wait(engine: VllmEngine) -> None:
    async with paused(engine, ask(max_tokens=LONG)) as (running,):
        pass
    waiting = asyncio.create_task(engine.generate(ask(max_tokens=2)))
    await asyncio.sleep(0.2)
    assert not running.done() and not waiting.done()
    assert await engine.health()
    await engine.resume()
    assert len((await running).token_ids) == LONG
    assert len((await waiting).token_ids) == 2


async def test_a_pause_is_no_sleep(engine: VllmEngine) -> None:
    await engine.pause("keep")
    assert not await engine.is_sleeping()
    await engine.sleep(2)
    assert await engine.is_sleeping()
    await engine.wake(["weights"])
    assert await engine.is_sleeping()
    await engine.wake(["kv_cache"])
    assert not await engine.is_sleeping()
    await engine.resume()


async def test_pause_wait_lets_running_requests_finish(engine: VllmEngine) -> None:
    async with sampling(engine, ask(max_tokens=LONG)) as (running,):
        await engine.pause("wait")
    assert (await asyncio.wait_for(running, WAIT_S)).finish_reason == "length"
    waiting = asyncio.create_task(engine.generate(ask(max_tokens=2)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await engine.resume()
    await waiting


async def test_abort_returns_what_was_sampled(engine: VllmEngine) -> None:
    request = ask(max_tokens=LONG)
    for _ in range(ATTEMPTS):
        async with sampling(engine, request, ask(max_tokens=LONG - 10)) as (task, other):
            await engine.abort(request.request_id)
        got = await task
        if len(got.token_ids) < LONG:  # else the abort came too late
            break
        await other
    assert got.finish_reason == "abort"
    assert len(got.token_ids) == len(got.logprobs) < LONG
    assert (await other).finish_reason == "length"


async def test_pause_abort_ends_everything(engine: VllmEngine) -> None:
    for _ in range(ATTEMPTS):
        async with sampling(engine, *(ask(max_tokens=LONG) for _ in range(3))) as tasks:
            await engine.pause("abort")
        got = [await task for task in tasks]
        await engine.resume()
        if all(len(one.token_ids) < LONG for one in got):  # else the pause came too late
            break
    assert {one.finish_reason for one in got} == {"abort"}


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_keeps_requests(engine: VllmEngine, model_folder: Path, level: int) -> None:
    request = ask(max_tokens=LONG)
    async with paused(engine, request) as (task,):
        await engine.sleep(level)
    await engine.wake(["weights"])
    if level == 2:
        await send(engine, tensors(model_folder), V0)
    await engine.wake(["kv_cache"])
    await engine.resume()
    got = await task
    assert len(got.token_ids) == LONG
    assert error(model_folder, request, got).max() <= 1


async def test_bad_requests_are_refused_and_harm_nobody(peer: Peer, engine: VllmEngine) -> None:
    with pytest.raises(EngineRejected, match=f"{MAX_LENGTH}|{MAX_LENGTH - 1}"):
        await engine.generate(ask(tokens=MAX_LENGTH + 44))
    with pytest.raises(EngineRejected, match=r"99999|token_ids"):
        await engine.generate(msgspec.structs.replace(ask(), token_ids=[99999]))
    async with aiohttp.ClientSession(headers=bearer(peer.token)) as session:
        for body in ({"token_ids": [1], "sampling_params": {"temperature": -1}}, {"token_ids": "x"}, {}):
            async with session.post(f"{engine.url}/inference/v1/generate", json=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"]
    assert len((await engine.generate(ask())).token_ids) == 16


async def test_finishing_an_update_that_was_not_started_is_an_error(engine: VllmEngine) -> None:
    with pytest.raises(EngineLost):
        await engine.finish_update(Version(0, 9))
    assert await engine.version() == V0


async def test_streaming_sends_every_token_once(peer: Peer, engine: VllmEngine) -> None:
    body = {
        "request_id": "s",
        "token_ids": [1, 2, 3],
        "stream": True,
        "sampling_params": {"max_tokens": 12, "temperature": 0.0},
    }
    chunks = []
    async with (
        aiohttp.ClientSession(headers=bearer(peer.token)) as session,
        session.post(f"{engine.url}/inference/v1/generate", json=body) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                chunks.append(msgspec.json.decode(line.removeprefix(b"data: "))["choices"][0])
    streamed = [token for chunk in chunks for token in chunk["token_ids"]]
    whole = await engine.generate(
        msgspec.structs.replace(ask(), token_ids=[1, 2, 3], max_tokens=12, sampling=Sampling(temperature=0.0))
    )
    assert streamed == whole.token_ids
    assert chunks[-1]["weight_versions"] == [{"version": "0.0", "start": 0, "end": 12}]


async def test_a_disconnected_client_frees_its_slot(peer: Peer, engine: VllmEngine) -> None:
    async with sampling(engine, ask(max_tokens=LONG)) as (task,):
        task.cancel()
    before = await metric(peer, "vllm:generation_tokens_total")
    async with asyncio.timeout(WAIT_S):
        while await metric(peer, "vllm:num_requests_running"):
            pass
    assert await metric(peer, "vllm:generation_tokens_total") - before < LONG / 2, "it was sampled to its end"


@pytest.mark.parametrize("peer", [pytest.param("vllm", marks=pytest.mark.slow)], indirect=True, scope="module")
async def test_a_server_scores_tokens_as_a_plain_pass_of_the_teacher_does(
    peer: Peer, engine: VllmEngine, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", peer.token)
    config = EndpointConfig(url=f"{peer.url}/v1", model=str(model_folder), api_key_env="TEACHER_KEY")
    await asyncio.to_thread(check_tokenizers, {}, {"algorithm.teacher.endpoint": config}, str(model_folder))
    rows = [[(7 * i + 3 * row) % 60 for i in range(length)] for row, length in enumerate((2, 40, 9))]
    tokens, mask = torch.zeros(3, 40, dtype=torch.int64), torch.zeros(3, 39, dtype=torch.bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
    mask[:2, 0] = True
    batch = Tensors(tokens, torch.tensor([len(ids) for ids in rows]), mask, torch.ones(3, 1, 1))
    (scored,) = await asyncio.to_thread(TeacherEndpoint(config).score, [batch])
    plain = PlainPass(scaled(model_folder))
    for row, ids in enumerate(rows[:2]):
        assert plain.errors(ids, scored[row, : len(ids) - 1].tolist()).max() <= 1
    assert not scored[2].any(), "it does not train"
    ((values, tokens),) = await asyncio.to_thread(TeacherEndpoint(config).likeliest, [batch], 3)
    exact, allowed = plain.logprobs(rows[1])
    for place, (logprobs, likeliest) in enumerate(zip(values[1].double(), tokens[1], strict=True)):
        assert (logprobs - exact[place, likeliest]).abs().max() <= allowed
        assert (logprobs - exact[place].topk(3).values).abs().max() <= allowed


ROUTES = (
    *("POST /inference/v1/generate", "POST /abort_requests", "POST /pause", "POST /resume", "GET /is_paused"),
    *("POST /init_weight_transfer_engine", "POST /start_weight_update", "POST /update_weights"),
    *(
        "POST /finish_weight_update",
        "GET /weight_info",
        "GET /get_world_size",
        "POST /weight_checker",
        "POST /sleep",
        "POST /wake_up",
    ),
    *("GET /load", "GET /metrics", "GET /no_such_route"),
)
OF_VLLM = (
    *("GET /v1/models", "POST /v1/completions", "POST /tokenize", "GET /version", "GET /docs", "GET /openapi.json"),
    *("POST /collective_rpc", "GET /server_info", "POST /reset_prefix_cache", "POST /abort_requests", "GET /ping"),
)


def routes(peer: Peer) -> tuple[str, ...]:
    return ROUTES + OF_VLLM if peer.kind == "vllm" else ROUTES


async def status(peer: Peer, route: str, **headers: str) -> int:
    method, path = route.split()
    async with (
        aiohttp.ClientSession(peer.url) as session,
        session.request(method, path, data="{}", headers=headers) as response,
    ):
        await response.read()
        return response.status


async def test_a_web_page_cannot_pause_an_engine(peer: Peer) -> None:
    simple = {"Origin": "https://example.com", "Content-Type": "text/plain"}  # a browser asks nobody before this
    assert await status(peer, "POST /pause", **simple) == 403
    assert await status(peer, "POST /pause", Host="rebound.example.com") == 403


async def test_without_the_token_every_route_is_refused(peer: Peer) -> None:
    for route in routes(peer):
        assert (route, await status(peer, route)) == (route, 401)
        assert (route, await status(peer, route, Authorization="Bearer " + "0" * 43)) == (route, 401)
    assert await status(peer, "GET /health") == 200


async def test_a_web_socket_needs_the_token_too(peer: Peer) -> None:
    async with aiohttp.ClientSession(peer.url) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect("/v1/realtime")
    assert refused.value.status in (401, 403)  # 401 where uvicorn does not know web sockets


async def test_the_token_opens_routes_and_stays_secret(peer: Peer, connect: Connect) -> None:
    assert await status(peer, "GET /weight_info", **bearer(peer.token)) == 200
    assert await status(peer, "GET /load", **{"x-api-key": peer.token}) == 200
    assert await status(peer, "POST /pause", **bearer(peer.token), Origin="null") == 403
    client = connect()
    await client.pause("keep")
    await client.resume()
    leader = psutil.Process(peer.group)
    for process in (leader, *leader.children(recursive=True)):
        # A child may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            assert peer.token not in " ".join([*process.cmdline(), *process.environ().values()])
    assert leader.is_running()
    assert peer.token not in peer.log.read_text()


async def test_a_trainer_that_another_has_replaced_cannot_touch_the_engine(connect: Connect) -> None:
    old, new = (connect(lineage=lineage) for lineage in (0, 1))
    await old.pause()
    await old.start_update()  # and here it is frozen
    served = await new.version()
    update = UpdateInfo(names=[], dtype_names=[], shapes=[], checksum="")
    calls = [
        *(old.pause, old.resume, old.start_update, old.version, old.is_sleeping),
        lambda: old.init_transfer(InitInfo(backend="ipc")),
        lambda: old.update(update),
        lambda: old.finish_update(Version(0, 7)),
        lambda: old.sleep(2),
        lambda: old.wake(["weights"]),
    ]
    for call in calls:
        with pytest.raises(TrainerReplaced):
            await call()
    assert await new.version() == served
