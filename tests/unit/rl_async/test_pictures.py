"""Images: what hostile files get, and tokens and inputs that equal those of each family's Hugging Face processor."""

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
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
    processor, tokenizer = saved(family, tmp_path), vision_tokenizer()
    theirs, draw, seen = oracle(family, vision_tokenizer(), monkeypatch), random.Random(family), 0
    for _ in range(conversations):
        text, images = conversation(draw, family)
        ids, positions = processor.expand(tokenizer.encode(text, add_special_tokens=False), images)
        shown = [[read_picture(image) for image in images]] if images else None
        expected = theirs(text=[text], images=shown, return_tensors=None, add_special_tokens=False)
        assert ids == expected["input_ids"][0]
        for position, image in zip(positions, images, strict=True):
            tokens = processor.encode(image).tokens
            found = ids[position : position + len(tokens)]
            assert [t == processor.image_token for t in found] == [t == processor.image_token for t in tokens]
        if images:
            inputs = processor.arguments([processor.encode(image) for image in images])
            assert inputs and all(np.array_equal(array, expected[name]) for name, array in inputs.items())
        seen += len(images)
    assert seen > conversations


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


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of grey pixels, whose header may lie about them."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"\0" * 9)), (b"IEND", b"")]
    body = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def text_bomb() -> bytes:
    return png(2, 2, (b"zTXt", b"a\0\0" + zlib.compress(b"0" * (80 << 20))))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", id="SVG"),
        pytest.param(drawing(0, form="BMP"), id="BMP"),
        pytest.param(drawing(0, form="TIFF"), id="TIFF"),
        pytest.param(png(60_000, 60_000), id="bomb of 3.6 billion pixels"),
        pytest.param(png(10_000, 10_000), id="bomb of 100 million pixels"),
        pytest.param(png(8_000, 8_000), id="64 million pixels"),
        pytest.param(text_bomb(), id="bomb of text"),
        pytest.param(png(0, 5), id="no pixels"),
        pytest.param(png(100, 100), id="fewer pixels than the header says"),
        *(
            pytest.param(drawing(0, form=form)[:cut], id=f"cut {form}")
            for form in ("PNG", "JPEG", "WEBP", "GIF")
            for cut in (30, 120)
        ),
    ],
)
def test_hostile_files_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        read_picture(data)


def test_a_file_of_too_many_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="bytes"):
        read_picture(b"\0" * (pictures.MOST_BYTES + 1))


@pytest.mark.parametrize(
    ("form", "mode"),
    [("PNG", m) for m in ("1", "L", "LA", "P", "RGBA")] + [("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA")],
)
def test_modes_become_rgb(form: str, mode: str) -> None:
    picture = read_picture(drawing(0, form=form, mode=mode))
    assert picture.mode == "RGB" and picture.size == (40, 24)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_transparent_pixels_are_white_and_grey_levels_of_16_bits_keep_their_upper_byte() -> None:
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 51))
    assert read_picture(encoded(half)).getpixel((0, 0)) == (204, 204, 204)
    grey = Image.fromarray(np.array([[0x1234, 0xFFFF]], np.uint16))
    assert [read_picture(encoded(grey)).getpixel((x, 0)) for x in (0, 1)] == [(0x12,) * 3, (0xFF,) * 3]


def test_the_orientation_of_a_photograph_is_applied_and_of_a_film_the_first_frame_counts() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = read_picture(encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif))
    assert turned.size == (4, 8)
    red, blue = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    assert read_picture(encoded(red, "GIF", save_all=True, append_images=[blue])).getpixel((0, 0)) == (255, 0, 0)
