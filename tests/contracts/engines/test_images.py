"""Prompts with images over HTTP: the embedded engine and real vLLM serve the same tiny models."""

import asyncio
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rl_async.configs.engines import EngineKind
from rl_async.errors import EngineRejected
from rl_async.launcher.cli.engine_verification import verify
from rl_async.messages import Sampling, Version
from rl_async.pictures import PictureProcessor
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Image
from rl_async.rollout_server.vllm.client import VllmEngine
from tests.conftest import vllm_python
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, paused, publish, running, send
from tests.support.rounding import PlainPass
from tests.support.tiny_models import drawing, save_vision_model

# vLLM takes minutes to start on a busy machine.
pytestmark = pytest.mark.timeout(600)

V0, V1 = Version(0, 0), Version(0, 1)


SERVED = [
    ("embedded", "qwen2_5_vl"),
    pytest.param(("vllm", "qwen2_5_vl"), marks=pytest.mark.nightly),
    pytest.param(("vllm", "qwen3_vl"), marks=pytest.mark.slow),
    # vLLM's SmolVLM is its Idefics3 with another processor.
    pytest.param(("vllm", "idefics3"), marks=pytest.mark.nightly),
    pytest.param(("vllm", "smolvlm"), marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module", params=SERVED, ids=lambda case: "-".join(case))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineKind, Path]:
    """The kind of engine, and a tiny model whose heads vLLM takes on a CPU."""
    kind, family = request.param
    folder = tmp_path_factory.mktemp(family)
    save_vision_model(family, folder, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    lacking = "import torchvision, num2words" if family == "smolvlm" else "import torchvision"
    if kind == "vllm" and subprocess.run([vllm_python(), "-c", lacking], capture_output=True).returncode:
        pytest.skip(f"vLLM's processor does not `{lacking}` here; use an environment of scripts/install vllm")
    return kind, folder


@pytest.fixture(scope="module")
def folder(served: tuple[EngineKind, Path]) -> Path:
    return served[1]


@pytest.fixture(scope="module")
def peer(served: tuple[EngineKind, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with running(*served, tmp_path_factory.mktemp("run"), eager=True, model_length=512) as started:
        yield started


@pytest.fixture(scope="module")
def processor(folder: Path) -> PictureProcessor:
    loaded = PictureProcessor.load(str(folder))
    assert loaded is not None
    return loaded


def scaled(folder: Path, tower: float = 1.0, language: float = 1.0) -> Any:
    """The folder's model with the matrices of its vision tower and of its language model scaled."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(tower if "visual" in name or "vision" in name else language)
    return model


async def update(client: VllmEngine, model: Any, version: Version) -> None:
    await send(client, [(name, weight.detach()) for name, weight in model.named_parameters()], version)


@pytest.fixture
async def engine(connect: Connect, folder: Path) -> VllmEngine:
    """A client; the engine serves the folder's weights as version 0.0."""
    client = connect()
    await update(client, scaled(folder), V0)
    return client


def ask(processor: PictureProcessor, *seeds: int, max_tokens: int = 8, **more: Any) -> GenerateRequest:
    """A prompt with a drawing for each seed. It ends before an image token, which Transformers takes for an image's."""
    ids = [3, 1, 4]
    for _ in seeds:
        ids += [processor.mark, 5, 9]
    drawings = [drawing(seed, 40, 24) for seed in seeds]
    expanded, positions = processor.expand(ids, drawings)
    settings: dict[str, Any] = {"sampling": Sampling(), "min_version": V0} | more
    return GenerateRequest(
        request_id=secrets.token_hex(4),
        token_ids=expanded,
        images=[Image.of(d, "image/png", p) for d, p in zip(drawings, positions, strict=True)],
        max_tokens=max_tokens,
        stop_token_ids=[processor.image_token],
        **settings,
    )


def inputs(processor: PictureProcessor, request: GenerateRequest, length: int) -> dict[str, torch.Tensor]:
    """The model's arguments for the images of a row."""
    pictures = [processor.encode(image.data) for image in request.images]
    arrays = processor.arguments(pictures)
    if "image_grid_thw" in arrays:
        kinds = np.zeros((1, length), dtype=np.int64)
        for image, picture in zip(request.images, pictures, strict=True):
            kinds[0, image.position : image.position + len(picture.tokens)] = 1
        arrays["mm_token_type_ids"] = kinds
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def row(request: GenerateRequest, got: GenerateResult) -> tuple[list[int], list[float]]:
    """The row's ids without the stop token, and the log-probabilities of its sampled tokens."""
    count = len(got.token_ids) - (got.finish_reason == "stop")
    return request.token_ids + got.token_ids[:count], got.logprobs[:count]


def errors(
    plain: PlainPass, processor: PictureProcessor, request: GenerateRequest, got: GenerateResult
) -> torch.Tensor:
    """Errors of the engine's log-probabilities, as multiples of what rounding explains."""
    ids, found = row(request, got)
    return plain.errors(ids, found, **inputs(processor, request, len(ids)))


async def test_logprobs_agree_with_a_plain_forward_pass(
    engine: VllmEngine, folder: Path, processor: PictureProcessor
) -> None:
    requests = [ask(processor, *seeds) for seeds in ((1,), (2, 3), (1,), (4, 4, 1), (2, 3))]
    model = scaled(folder)
    plain, off = PlainPass(model), list[float]()
    # Once more, on the prefixes that the engine has kept.
    for _ in range(2):
        for request, got in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            assert (errors(plain, processor, request, got) <= 1).all()
            ids, found = row(request, got)
            with torch.no_grad():
                logits = model(torch.tensor([ids]), **inputs(processor, request, len(ids))).logits[0]
            expected = logits.log_softmax(-1)[
                range(len(request.token_ids) - 1, len(ids) - 1), ids[len(request.token_ids) :]
            ]
            off += (expected - torch.tensor(found)).abs().tolist()
    assert np.mean(off) <= 1e-5


async def test_it_is_verified_with_images(peer: Peer, engine: VllmEngine, folder: Path) -> None:
    """On a model whose attention is far from uniform, a largest difference of 1e-3 is 100 times the mean."""
    found = await asyncio.to_thread(verify, engine.url, folder, 6, 1e-3, peer.kind, peer.token)
    assert found.ok and found.mean <= 1e-5 and found.tokens > 6
    await update(engine, scaled(folder, tower=1.5), V1)
    found = await asyncio.to_thread(verify, engine.url, folder, 6, 1e-3, peer.kind, peer.token)
    assert not found.ok


async def test_another_image_gives_other_numbers_and_the_same_image_the_same(
    engine: VllmEngine, processor: PictureProcessor
) -> None:
    greedy = {"sampling": Sampling(temperature=0.0), "max_tokens": 1}
    same, again, other = [await engine.generate(ask(processor, seed, **greedy)) for seed in (7, 7, 8)]
    assert same.token_ids == again.token_ids and abs(same.logprobs[0] - again.logprobs[0]) < 1e-5
    assert other.token_ids != same.token_ids or abs(other.logprobs[0] - same.logprobs[0]) > 1e-3


async def test_updates_reach_both_towers_and_requests_in_flight(
    engine: VllmEngine, folder: Path, processor: PictureProcessor
) -> None:
    before = await engine.checksums()
    request, new = ask(processor, 5, max_tokens=200), scaled(folder, tower=1.5)
    request = msgspec.structs.replace(request, stop_token_ids=[])
    first = ask(processor, 6)
    await engine.generate(first)
    async with paused(engine, request) as (task,):
        await update(engine, new, V1)
    got = await task
    assert [run.version for run in got.versions] == [V0, V1]
    after = await engine.checksums()
    moved = {name for name in before if before[name] != after[name]}
    assert moved and all("vis" in name for name in moved)
    # The images of both prompts are known from the time of the old weights.
    for again in (first, ask(processor, 5)):
        changed = await engine.generate(msgspec.structs.replace(again, min_version=V1))
        assert (errors(PlainPass(new), processor, again, changed) <= 1).all()
    both = scaled(folder, tower=1.5, language=1.25)
    await update(engine, both, Version(0, 2))
    assert (errors(PlainPass(both), processor, first, await engine.generate(first)) <= 1).all()


async def test_shards_of_two_trainer_ranks_reach_both_towers(
    peer: Peer, engine: VllmEngine, folder: Path, processor: PictureProcessor, tmp_path: Path
) -> None:
    new, version = scaled(folder, tower=1.5, language=1.25), Version(0, 3)
    named = {name: weight.detach() for name, weight in new.named_parameters()}
    sent = await asyncio.to_thread(publish, peer, named, version, 2, "ipc", tmp_path)
    assert sent >= sum(weight.nbytes for weight in named.values())
    request = ask(processor, 11, 12, min_version=version)
    assert (errors(PlainPass(new), processor, request, await engine.generate(request)) <= 1).all()


async def test_images_that_do_not_fit_are_refused(engine: VllmEngine, processor: PictureProcessor) -> None:
    request = ask(processor, 9)
    (image,) = request.images
    others = [
        Image.of(other, "image/png", image.position)
        for other in (drawing(9, *size) for size in ((32, 16), (64, 64), (320, 40)))
        # Idefics3 has as many tokens for images of most sizes.
        if len(processor.expand([3, 1, 4, processor.mark, 5, 9], [other])[0]) != len(request.token_ids)
    ]
    broken = Image.of(image.data[: len(image.data) // 2], "image/png", image.position)
    for images in (*([other] for other in others), [broken], [image, image]):
        with pytest.raises(EngineRejected):
            await engine.generate(msgspec.structs.replace(request, images=images))
    assert (await engine.generate(request)).token_ids
