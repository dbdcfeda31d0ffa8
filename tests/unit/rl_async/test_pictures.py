"""Images: tokens and inputs that equal those of each family's Hugging Face processor."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Processor,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.smolvlm import processing_smolvlm
from transformers.processing_utils import ProcessorMixin

from rl_async import pictures
from rl_async.errors import DataError, UserError
from rl_async.picture_decoder import Want
from rl_async.pictures import FAMILIES, PictureProcessor, read_picture
from tests.support.vision_models import IMAGE, drawing, image_processor, vision_config, vision_tokenizer


def saved(family: str, folder: Path) -> PictureProcessor:
    """The processor of a folder without weights."""
    tokenizer = vision_tokenizer()
    vision_config(family, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor(family).save_pretrained(folder)
    found = PictureProcessor.load(str(folder))
    assert found is not None
    return found


def oracle(family: str, tokenizer: PreTrainedTokenizerFast, patch: pytest.MonkeyPatch) -> Any:
    """Load the processor of Transformers that the family is compared with."""
    # A processor of videos needs torchvision, and num2words is for videos too.
    patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    patch.setattr(processing_smolvlm, "num2words", object())
    match family:
        case "qwen2_5_vl" | "qwen3_vl":
            kind = Qwen2_5_VLProcessor if family == "qwen2_5_vl" else Qwen3VLProcessor
            return kind(image_processor(family), tokenizer)
        case "idefics3":
            return Idefics3Processor(image_processor(family), tokenizer, image_seq_len=4)
        case "smolvlm":
            return processing_smolvlm.SmolVLMProcessor(image_processor(family), tokenizer, None, image_seq_len=4)
        case "gemma3":
            marks = {
                "image_token": "<image_soft_token>",
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
            }
            for name, text in marks.items():
                setattr(tokenizer, name, text)
                setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
            return Gemma3Processor(image_processor(family), tokenizer, image_seq_length=4)
    raise AssertionError(family)


def conversation(draw: random.Random, family: str) -> tuple[str, list[bytes]]:
    """A rendered conversation of random turns, and its images."""
    text, images = "", []
    for _ in range(draw.randint(1, 3)):
        text += f"<|im_start|>{draw.choice(['user', 'assistant'])}\n"
        for _ in range(draw.randint(0, 3)):
            text += draw.choice(["see", "\n", " and\n\n", "\n\n\nthen ", ""])
            if draw.random() < 0.6:
                text += IMAGE[family]
                images.append(drawing(draw.randrange(9), draw.randint(8, 64), draw.randint(8, 64)))
        text += "<|im_end|>\n"
    return text, images


@pytest.mark.parametrize("conversations", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_inputs_equal_those_of_the_familys_processor(
    family: str, conversations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, differing = compared_with_the_family(family, conversations, tmp_path, monkeypatch)
    assert not differing and images > conversations


def compared_with_the_family(
    family: str, conversations: int, folder: Path, patch: pytest.MonkeyPatch
) -> tuple[int, list[str]]:
    """Expand made conversations; return how many images they have, and those whose ids or inputs differ."""
    processor, tokenizer = saved(family, folder), vision_tokenizer()
    theirs, draw, seen = oracle(family, vision_tokenizer(), patch), random.Random(family), 0
    differing: list[str] = []
    for _ in range(conversations):
        text, images = conversation(draw, family)
        ids, positions = processor.expand(tokenizer.encode(text, add_special_tokens=False), images)
        shown = [[read_picture(image) for image in images]] if images else None
        expected = theirs(text=[text], images=shown, return_tensors=None, add_special_tokens=False)
        same = ids == expected["input_ids"][0]
        for position, image in zip(positions, images, strict=True):
            tokens = processor.encode(image).tokens
            found = ids[position : position + len(tokens)]
            same &= [t == processor.image_token for t in found] == [t == processor.image_token for t in tokens]
        if images:
            inputs = processor.arguments([processor.encode(image) for image in images])
            same &= bool(inputs) and all(np.array_equal(array, expected[name]) for name, array in inputs.items())
        if not same:
            differing.append(text)
        seen += len(images)
    return seen, differing


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_equal_the_models_rope_index(family: str, tmp_path: Path) -> None:
    processor, tokenizer, draw = saved(family, tmp_path), vision_tokenizer(), random.Random(family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config(family, tokenizer)).model
    for _ in range(20):
        text, images = conversation(draw, family)
        ids, starts = processor.expand(tokenizer.encode(text, add_special_tokens=False), images)
        pictures = [processor.encode(image) for image in images]
        found = processor.rope_positions(len(ids), list(zip(starts, pictures, strict=True)))
        assert found is not None
        tokens = torch.tensor([ids])
        grids = torch.tensor(np.concatenate([one.inputs["image_grid_thw"] for one in pictures])) if pictures else None
        kinds = (tokens == processor.image_token).int()
        expected, _ = model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grids)
        assert np.array_equal(found, expected[:, 0].numpy())


def test_a_processor_is_absent_for_text_models_and_refused_for_unknown_families(tmp_path: Path) -> None:
    assert PictureProcessor.load(str(tmp_path)) is None
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3"}')
    assert PictureProcessor.load(str(tmp_path)) is None
    config.write_text('{"model_type": "llava", "vision_config": {}}')
    with pytest.raises(UserError, match="llava"):
        PictureProcessor.load(str(tmp_path))
    config.write_text('{"model_type": "gemma3", "vision_config": {}}')
    with pytest.raises(UserError, match="image processor"):
        PictureProcessor.load(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_learned_tokens_stay_those_of_the_text(family: str, tmp_path: Path) -> None:
    processor, tokenizer, draw = saved(family, tmp_path), vision_tokenizer(), random.Random(family)
    for _ in range(20):
        text, images = conversation(draw, family)
        ids = tokenizer.encode(text, add_special_tokens=False)
        newline = {token for token in ids if not tokenizer.decode([token]).strip("\n")}
        learned = [token != processor.mark and token not in newline for token in ids]
        expanded, flags, positions = processor.expand_row(ids, learned, images)
        assert (expanded, positions) == processor.expand(ids, images) and len(flags) == len(expanded)
        said = [token for token, flag in zip(ids, learned, strict=True) if flag]
        assert [token for token, flag in zip(expanded, flags, strict=True) if flag] == said


def test_another_number_of_images_than_marks_is_refused(tmp_path: Path) -> None:
    processor = saved("qwen2_5_vl", tmp_path)
    with pytest.raises(DataError, match="1 marks of images and 2 images"):
        processor.expand([1, processor.mark, 2], [drawing(0), drawing(1)])
    with pytest.raises(DataError, match="1 marks"):
        processor.expand([1, processor.mark, 2], [])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_follow_from_the_size_in_the_header(family: str, tmp_path: Path) -> None:
    processor, draw = saved(family, tmp_path), random.Random(family)
    for _ in range(20):
        image = drawing(0, draw.randint(1, 90), draw.randint(1, 90))
        tokens = processor.encode(image).tokens
        assert processor.tokens(image) == tokens
        # The rest of the file has pixels alone.
        assert processor.tokens(image[: len(image) // 2], Want.HEADER) == tokens
    with pytest.raises(DataError):
        processor.tokens(image[: len(image) // 2])


def test_a_shape_that_the_processor_refuses_is_an_error_of_the_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1000 x 2 pixels"):
        saved("qwen2_5_vl", tmp_path).encode(drawing(0, 1000, 2))


def test_the_cache_is_bounded_and_returns_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = saved("qwen2_5_vl", tmp_path)
    first = processor.encode(drawing(0))
    assert processor.encode(drawing(0)) is first
    monkeypatch.setattr(pictures, "CACHE_BYTES", 2 * first.nbytes)
    second = processor.encode(drawing(1))
    assert processor.encode(drawing(0)) is first
    processor.encode(drawing(2))
    # The least recently used one left.
    assert processor.encode(drawing(0)) is first
    assert processor.encode(drawing(1)) is not second
