"""Prompts with images: log-probabilities are those of a plain forward pass, and no cache confuses two images."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rl_async.errors import DataError
from rl_async.messages import Media, Sampling, Trajectory
from rl_async.pictures import PictureProcessor
from rl_async.rollout_server.api import Image
from rl_async.rollout_server.embedded import core
from rl_async.rollout_server.embedded.core import ATTENTION, SERVED_WITH_IMAGES, EngineCore, PlacedImage, place_images
from rl_async.trainer.packing import collate, lay_images
from tests.support.rounding import PlainPass
from tests.support.tiny_models import drawing, save_vision_model
from tests.unit.trainer.test_families import built


@dataclass
class Family:
    """A tiny model in a folder, and the processor of its images."""

    folder: Path
    model: Any
    processor: PictureProcessor

    def prompt(self, ids: Sequence[int], *drawings: bytes) -> tuple[list[int], list[Image]]:
        """Encode a prompt with images as an agent worker does, and place them in it."""
        expanded, positions = self.processor.expand(ids, drawings)
        return expanded, [Image.of(d, "image/png", p) for d, p in zip(drawings, positions, strict=True)]

    def sequence(self, ids: Sequence[int], images: Sequence[Image], **more: Any) -> core.Sequence:
        """A sequence that ends before an image token: Transformers takes any of them for part of an image."""
        defaults: dict[str, Any] = {
            "request_id": "",
            "sampling": Sampling(),
            "max_tokens": 8,
            "seed": None,
            "stop_token_ids": frozenset([self.processor.image_token]),
        }
        return core.Sequence(
            tokens=list(ids),
            images=place_images(self.processor, ids, images),
            deliver=lambda _: None,
            **(defaults | more),
        )

    def engine(self, **more: Any) -> EngineCore:
        served = copy.deepcopy(self.model)
        served.set_attn_implementation(ATTENTION)
        return EngineCore(served, pictures=self.processor, **({"max_batch": 6, "max_length": 256} | more))

    def inputs(self, length: int, images: Sequence[PlacedImage]) -> dict[str, Tensor]:
        """The arguments of the whole model for a row with these images."""
        if not images:
            return {}
        arguments = self.processor.arguments([image.picture for image in images])
        kinds = np.zeros((1, length), dtype=np.int64)
        for image in images:
            kinds[0, image.features] = 1
        name = "mm_token_type_ids" if "image_grid_thw" in arguments else "token_type_ids"
        if self.model.config.model_type not in ("idefics3", "smolvlm"):
            arguments[name] = kinds
        return {name: torch.from_numpy(array) for name, array in arguments.items()}


@pytest.fixture(scope="module", params=SERVED_WITH_IMAGES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family_in(tmp_path_factory.mktemp(request.param), request.param)


def family_in(folder: Path, name: str) -> Family:
    """Save a tiny model of the family in the folder, and load it."""
    save_vision_model(name, folder)
    processor = PictureProcessor.load(str(folder))
    assert processor is not None
    return Family(folder, AutoModelForImageTextToText.from_pretrained(folder).eval(), processor)


def finish(engine: EngineCore) -> None:
    while engine.unfinished:
        engine.step()


def words(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(count)]


def assert_as_plain(family: Family, sequences: Sequence[core.Sequence]) -> None:
    plain = PlainPass(family.model)
    for s in sequences:
        count = len(s.logprobs) - (s.finish_reason == "stop")
        tokens = s.tokens[: s.prompt_length + count]
        errors = plain.errors(tokens, s.logprobs[:count], **family.inputs(len(tokens), s.images))
        assert (errors <= 1).all(), f"{s.request_id}: {errors.max():.3g} times what rounding explains"


def test_logprobs_agree_with_a_plain_forward_pass(family: Family) -> None:
    """Over turns of different lengths and numbers of images, with a preemption, on prefixes of earlier turns."""
    mark, engine = family.processor.mark, family.engine()
    one = family.prompt([*words(5, 0), mark, *words(9, 1)], drawing(0))
    two = family.prompt([mark, *words(3, 2), mark, *words(20, 3)], drawing(1, 24, 40), drawing(0))
    none = words(30, 4), list[Image]()
    first = [family.sequence(*prompt, request_id=str(n)) for n, prompt in enumerate((one, two, none, one))]
    for sequence in first:
        engine.add(sequence)
    engine.step()
    engine.preempt()
    finish(engine)
    turns = []
    for sequence, (_, images) in zip(first, (one, two, none, one), strict=True):
        more, added = family.prompt([*words(4, 5), mark, 7], drawing(2, 56, 24))
        said = [token for token in sequence.tokens[sequence.prompt_length :] if token != family.processor.image_token]
        before = [*sequence.tokens[: sequence.prompt_length], *said]
        later = [Image.of(i.data, i.mime, i.position + len(before)) for i in added]
        turns.append(family.sequence([*before, *more], [*images, *later], request_id="later"))
        engine.add(turns[-1])
    finish(engine)
    assert engine.cached_tokens > 60 and engine.preemptions
    assert_as_plain(family, (*first, *turns))


def test_the_trainer_computes_the_same_logprobs(family: Family) -> None:
    """Also where the policy has sampled an image token, which both take for text."""
    assert torch.cat(off_from_the_trainer(family)).mean() <= 1e-5


def off_from_the_trainer(family: Family) -> list[Tensor]:
    """Sample from prompts with images; return how far the trainer's log-probabilities are from the engine's, by row."""
    mark, engine = family.processor.mark, family.engine()
    todo = []
    for seed in range(6):
        prompt, images = family.prompt([*words(5, seed), mark, *words(2, seed), mark, 3], drawing(seed), drawing(9, 56))
        prompt += [family.processor.image_token, 65]
        todo.append(family.sequence(prompt, images, max_tokens=20, stop_token_ids=frozenset()))
        engine.add(todo[-1])
    finish(engine)
    model = built(family.folder)
    rows = [trained_row(n, sequence) for n, sequence in enumerate(todo)]
    media = {Media.of(data, "", 0).sha256: data for data in (drawing(9, 56), *map(drawing, range(6)))}
    tensors = collate(rows, device="cpu", images=lay_images(rows, media, family.processor, "cpu"))
    with torch.no_grad():
        found = model.outputs(tensors, frozenset()).logprobs
    assert found is not None
    return [
        (one[s.prompt_length - 1 :][:20] - torch.tensor(s.logprobs)).abs() for one, s in zip(found, todo, strict=True)
    ]


def trained_row(number: int, sequence: core.Sequence) -> Trajectory:
    return Trajectory(
        task_id="t",
        group_id=0,
        sample=number,
        attempt=0,
        episode_id=f"0.{number}",
        token_ids=np.array(sequence.tokens, np.int32),
        loss_mask=np.arange(len(sequence.tokens)) >= sequence.prompt_length,
        logprobs=np.zeros(len(sequence.tokens), np.float32),
        versions=[],
        sampling=Sampling(),
        reward=0.0,
        media=[Media(sha256=image.sha256, mime="image/png", position=image.position) for image in sequence.images],
    )


def test_equal_ids_with_different_images_share_nothing(family: Family) -> None:
    ids = [*words(20, 6), family.processor.mark, *words(40, 7)]
    (prompt, image), (same, other) = (family.prompt(ids, drawing(seed)) for seed in (8, 9))
    assert prompt == same
    engine = family.engine(max_batch=2)
    both = [family.sequence(prompt, images, max_tokens=1) for images in (image, other)]
    for sequence in both:
        engine.add(sequence)
    finish(engine)
    assert not any(s.cached_tokens for s in both), "they are computed at once"
    again = [family.sequence(prompt, images, max_tokens=1) for images in (image, other, image)]
    for sequence in again:
        engine.add(sequence)
        finish(engine)
    assert all(s.cached_tokens > len(prompt) - 20 for s in again), "each finds its own prefix"
    third = family.sequence(prompt, family.prompt(ids, drawing(10))[1], max_tokens=1)
    engine.add(third)
    finish(engine)
    assert third.cached_tokens <= third.images[0].position, "only the text before the image is known"
    assert_as_plain(family, (*both, *again, third))


def test_a_prefix_that_ends_in_an_image_is_continued(family: Family) -> None:
    """By a prompt that goes on otherwise behind one of two images, wherever blocks end in them."""
    mark, engine = family.processor.mark, family.engine()
    todo = []
    for start in range(14, 32, 3):
        for last in (1, 2):
            ids = [*words(start, start), mark, 7, mark, *words(40, last)]
            todo.append(family.sequence(*family.prompt(ids, drawing(21), drawing(22)), max_tokens=1))
            engine.add(todo[-1])
            finish(engine)
    assert all(s.cached_tokens for s in todo[3::2])
    assert_as_plain(family, todo)


def test_an_image_is_read(family: Family) -> None:
    """Greedy log-probabilities change with the image, and not between two runs with the same one."""
    ids = [*words(4, 11), family.processor.mark, *words(4, 12)]
    found = []
    for seed in (13, 13, 14):
        prompt, images = family.prompt(ids, drawing(seed))
        sequence = family.sequence(prompt, images, sampling=Sampling(temperature=0.0), max_tokens=1)
        engine = family.engine()
        engine.add(sequence)
        finish(engine)
        found.append((sequence.tokens[-1], sequence.logprobs[0]))
    assert found[0] == found[1] != found[2]


def test_weights_of_the_tower_that_change_count_from_then_on(family: Family) -> None:
    engine = family.engine()
    prompt, images = family.prompt([*words(20, 15), family.processor.mark, *words(20, 16)], drawing(17))
    # A seed of its own: a draw of the session's could end the second one before the update.
    first, running = (family.sequence(prompt, images, max_tokens=n, seed=1) for n in (1, 8))
    for sequence in (first, running):
        engine.add(sequence)
    engine.step()
    updated = Family(family.folder, copy.deepcopy(family.model), family.processor)
    with torch.no_grad():
        for model in (engine.model, updated.model):
            for name, weight in model.named_parameters():
                if "vis" in name:
                    weight.mul_(1.5)
    engine.weights_changed()
    engine.preempt()
    engine.version = "0.1"
    last = family.sequence(prompt, images)
    engine.add(last)
    finish(engine)
    assert last.cached_tokens == 0
    assert_as_plain(updated, [last])
    assert_as_plain(family, [first])
    # The token of the second prompt that was sampled before the update has the old weights' log-probability.
    resumed = copy.copy(running)
    count = running.runs[1][1]
    resumed.logprobs, resumed.prompt_length = running.logprobs[count:], running.prompt_length + count
    assert_as_plain(updated, [resumed])


def test_ids_that_do_not_hold_an_image_are_refused(family: Family) -> None:
    prompt, (image,) = family.prompt([1, 2, family.processor.mark, 3], drawing(18))
    other = Image.of(drawing(19, 64, 32), "image/png", image.position)
    moved = Image.of(image.data, image.mime, image.position + 1)
    outside = Image.of(image.data, image.mime, len(prompt) - 1)
    wrongs = [[moved], [outside], [image, image]]
    # All images have as many tokens in Gemma 3.
    if family.processor.encode(other.data).tokens != family.processor.encode(image.data).tokens:
        wrongs.append([other])
    for wrong in wrongs:
        with pytest.raises(DataError):
            place_images(family.processor, prompt, wrong)
    with pytest.raises(DataError):
        place_images(None, prompt, [image])
    assert [p.position for p in place_images(family.processor, prompt, [image])] == [image.position]
