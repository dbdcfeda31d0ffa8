"""Mixtures of experts, on a real engine: weights arrive one by one; answers name the experts of their tokens."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.layout import TensorSpec, single
from rl_async.weight_sync.layout import engine as engine_layout
from tests.conftest import VOCAB, save_tokenizer
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, differences, errors, publish, running, scaled, send
from tests.support.rounding import PlainPass
from tests.support.tiny_models import chosen, sparse_model

PATIENT = pytest.mark.timeout(600)
V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
BY_TENSORS, BY_STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
BY_EXPERTS = BY_TENSORS | {"expert_parallel": 2}
# Two data-parallel copies, each with half of the experts.
BY_COPIES, COPIES = {"expert_parallel": 2}, ("--data-parallel-size", "2")


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE of 2 layers, away from the even distribution of a fresh one."""
    folder = tmp_path_factory.mktemp("sparse")
    sparse_model(VOCAB).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def peer(
    request: pytest.FixtureRequest, sparse_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    """A running engine of each kind and division among ranks."""
    kind, ranks = request.param
    eager = ranks != BY_STAGES  # on a CPU vLLM's later stages fail without its warm-up
    flags = COPIES if ranks == BY_COPIES else ()
    with running(kind, sparse_folder, tmp_path_factory.mktemp("run"), eager=eager, ranks=ranks, flags=flags) as started:
        yield started


def ask(tokens: int, version: Version, routed_from: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=secrets.token_hex(4),
        token_ids=[(7 * i + 3) % 60 for i in range(tokens)],
        max_tokens=20,
        sampling=Sampling(),
        stop_token_ids=[],
        min_version=version,
        routed_from=routed_from,
    )


@pytest.mark.parametrize(
    "peer",
    [
        ("embedded", {}),
        pytest.param(("vllm", BY_EXPERTS), marks=[pytest.mark.slow, PATIENT]),
        # test_several_ranks.py has copies of a model, too.
        pytest.param(("vllm", BY_COPIES), marks=[pytest.mark.nightly, PATIENT]),
        pytest.param(("vllm", BY_TENSORS), marks=[pytest.mark.nightly, PATIENT]),
        # A stage holds its layers as a vLLM of one rank does; test_several_ranks.py divides a model so.
        pytest.param(("vllm", BY_STAGES), marks=[pytest.mark.nightly, PATIENT]),
    ],
    ids=["embedded", "vllm-experts", "vllm-copies", "vllm-tensors", "vllm-stages"],
    indirect=True,
    scope="module",
)
async def test_updates_reach_every_expert(peer: Peer, connect: Connect, sparse_folder: Path, tmp_path: Path) -> None:
    client = connect()
    fresh = await client.checksums()
    for version, scale in ((V0, 1.0), (V1, 1.3)):
        model = scaled(sparse_folder, scale)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".experts." in name:
                    parameter.mul_(torch.linspace(1.0, scale, 8)[:, None, None])  # each by another number
        named = {name: part.detach() for name, part in single(model.named_parameters())}
        await send(client, list(named.items()), version)
        if "tensor_parallel" in peer.ranks:
            await assert_workers_need_what_the_rules_say(client, named, peer.ranks.get("expert_parallel", 1))
        if peer.ranks:  # and again, to each worker what it needs, from two trainer ranks
            await send(client, [(name, torch.zeros_like(part)) for name, part in named.items()], version)
            await asyncio.to_thread(publish, peer, named, version, 2, "nearest", tmp_path)
        assert (await client.checksums() == fresh) == (scale == 1.0), "not the bits of a fresh load"
        requests = [ask(5 + i, version) for i in range(12)]
        answers = await asyncio.gather(*map(client.generate, requests))
        plain, unscaled = PlainPass(model), scaled(sparse_folder)
        for request, got in zip(requests, answers, strict=True):
            assert errors(plain, request, got).max() <= 1
            assert scale == 1.0 or differences(unscaled, request, got).max() > 1e-3


async def assert_workers_need_what_the_rules_say(client: VllmEngine, named: Mapping[str, Tensor], ep: int) -> None:
    specs = {name: TensorSpec(tuple(tensor.shape), "float32") for name, tensor in named.items()}
    rules = engine_layout(specs, tp=2, ep=ep, kv_heads=1)
    found = await client.boxes({name: list(spec.shape) for name, spec in specs.items()})
    assert found is not None and len(found) == 2
    for worker, of_tensors in enumerate(found):
        for name, boxes in zip(named, of_tensors, strict=True):
            expected = [shard.box for shard in rules.shards[name] if shard.rank == worker]
            assert [tuple(map(tuple, box)) for box in boxes] == expected, name


@pytest.mark.parametrize("peer", [("embedded", {})], ids=["embedded"], indirect=True, scope="module")  # vLLM: GPUs only
async def test_answers_have_the_experts_of_a_plain_forward_pass(connect: Connect, sparse_folder: Path) -> None:
    client, model = connect(max_coalesced=4), scaled(sparse_folder)
    await send(client, [(name, part.detach()) for name, part in single(model.named_parameters())], V2)
    requests = [ask(40, V2) for _ in range(4)] + [ask(5 + i, V2, routed_from=i) for i in range(6)]
    answers = await asyncio.gather(*map(client.generate, requests))
    more = [
        GenerateRequest(  # the next turn, whose prefix is known
            request_id=secrets.token_hex(4),
            token_ids=[*request.token_ids, *got.token_ids, 7, 8],
            max_tokens=9,
            sampling=Sampling(),
            stop_token_ids=[],
            routed_from=len(request.token_ids) + len(got.token_ids) - 1,
        )
        for request, got in zip(requests, answers, strict=True)
    ]
    answers += await asyncio.gather(*map(client.generate, more))
    for request, got in zip(requests + more, answers, strict=True):
        assert got.routes is not None and got.routes.start == request.routed_from
        expected = chosen(model, [*request.token_ids, *got.token_ids][:-1])[request.routed_from :]
        assert np.array_equal(np.sort(got.routes.experts, -1), expected.numpy())
        assert got.routes.experts.dtype == np.uint8
