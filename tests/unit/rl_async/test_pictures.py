"""Images: tokens and inputs that equal those of each family's Hugging Face processor."""

import fcntl
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, PngImagePlugin
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
from rl_async.picture_decoder import MEMORY_BYTES, MOST_BYTES, Decoder, Want
from rl_async.pictures import FAMILIES, PictureProcessor, read_picture
from tests.support.hostile_images import HOSTILE, encoded, png
from tests.support.tiny_models import IMAGE, drawing, image_processor, vision_config, vision_tokenizer


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


# The decoder of images: what odd and hostile files get, and limits that end its program and not the caller.


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    made = Decoder()
    yield made
    made.close()


@pytest.mark.parametrize("want", Want)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_even_when_only_the_size_is_wanted(decoder: Decoder, name: str, want: Want) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(DataError, match=reason):
        decoder.decode(data, want)


def test_a_file_of_too_many_bytes_is_refused(decoder: Decoder) -> None:
    with pytest.raises(DataError, match="bytes, more than"):
        decoder.decode(b"\0" * (MOST_BYTES + 1), Want.HEADER)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_cut_file_is_refused_unless_it_has_all_pixels(decoder: Decoder, form: str) -> None:
    data = drawing(0, 12, 10, form=form)
    whole, kept = decoder.decode(data, Want.PIXELS), 0
    for size in range(0, len(data), 1 if form == "PNG" else 29):
        try:
            found = decoder.decode(data[:size], Want.PIXELS)
        except DataError:
            continue
        # Only a trailer is missing.
        assert found == whole
        kept += 1
    # A PNG ends with the chunk IEND of 12 bytes and the checksum of its pixels.
    assert kept < 24


def test_a_png_with_fewer_pixels_than_its_header_says_is_refused_when_it_is_decoded(decoder: Decoder) -> None:
    assert decoder.decode(png(100, 100), Want.HEADER)[:2] == (100, 100)
    with pytest.raises(DataError, match="damaged"):
        decoder.decode(png(100, 100), Want.SIZE)


def pixel(decoder: Decoder, data: bytes) -> tuple[int, ...]:
    return tuple(decoder.decode(data, Want.PIXELS).pixels[:3])


@pytest.mark.parametrize(
    ("form", "mode"),
    [("PNG", m) for m in ("1", "L", "LA", "P", "RGBA")] + [("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA")],
)
def test_modes_become_rgb(decoder: Decoder, form: str, mode: str) -> None:
    width, height, pixels = decoder.decode(drawing(0, form=form, mode=mode), Want.PIXELS)
    assert (width, height, len(pixels)) == (40, 24, 40 * 24 * 3)
    assert decoder.decode(drawing(0, form=form, mode=mode), Want.HEADER)[:2] == (40, 24)


def test_transparent_pixels_are_white(decoder: Decoder) -> None:
    assert pixel(decoder, encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 51)))) == (204, 204, 204)
    assert pixel(decoder, encoded(Image.new("LA", (1, 1), (0, 51)))) == (204, 204, 204)
    # PA is only held in memory; its file has a palette and a transparent entry.
    palette = Image.new("P", (1, 1))
    palette.putpalette([10, 20, 30])
    assert pixel(decoder, encoded(palette)) == (10, 20, 30)
    assert pixel(decoder, encoded(palette, transparency=0)) == (255, 255, 255)


def test_grey_levels_of_16_bits_keep_their_upper_byte(decoder: Decoder) -> None:
    grey = encoded(Image.fromarray(np.array([[0x1234, 0xFFFF]], np.uint16)))
    assert decoder.decode(grey, Want.PIXELS).pixels == b"\x12\x12\x12\xff\xff\xff"


# Where the first pixel of the file and the last of its first row are to be, for each orientation of EXIF.
_CORNERS = {
    1: ((0, 0), (7, 0)),
    2: ((7, 0), (0, 0)),
    3: ((7, 3), (0, 3)),
    4: ((0, 3), (7, 3)),
    5: ((0, 0), (0, 7)),
    6: ((3, 0), (3, 7)),
    7: ((3, 7), (3, 0)),
    8: ((0, 7), (0, 0)),
}


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_the_orientation_is_applied_and_known_from_the_header(decoder: Decoder, form: str) -> None:
    image = Image.new("RGB", (8, 4), "black")
    image.putpixel((0, 0), (255, 255, 255))
    image.putpixel((7, 0), (128, 128, 128))
    lossless = {"lossless": True} if form == "WEBP" else {"quality": 100} if form == "JPEG" else {}
    for orientation, (first, last) in _CORNERS.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(image, form, exif=exif, **lossless)
        width, height, pixels = decoder.decode(data, Want.PIXELS)
        assert (width, height) == ((8, 4) if orientation < 5 else (4, 8))
        found = Image.frombytes("RGB", (width, height), bytes(pixels)).convert("L")
        # JPEG is lossy.
        assert abs(found.getpixel(first) - 255) < 40 and abs(found.getpixel(last) - 128) < 40
        assert decoder.decode(data, Want.HEADER)[:2] == (width, height)


def test_of_films_the_first_frame_counts(decoder: Decoder) -> None:
    red, blue = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    for form in ("GIF", "PNG"):
        assert pixel(decoder, encoded(red, form, save_all=True, append_images=[blue] * 20)) == (255, 0, 0)
    film = encoded(red, "WEBP", save_all=True, append_images=[blue] * 20, lossless=True)
    assert pixel(decoder, film) == (255, 0, 0)


def test_profiles_and_texts_change_no_pixel(decoder: Decoder) -> None:
    image, text = Image.new("RGB", (1, 1), (10, 20, 30)), PngImagePlugin.PngInfo()
    text.add_text("comment", "long " * 100_000, zip=True)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    assert pixel(decoder, encoded(image, icc_profile=profile, pnginfo=text)) == (10, 20, 30)


@pytest.mark.slow
def test_the_largest_images_fit_into_the_memory(decoder: Decoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGBA", (7071, 7071), (1, 2, 3, 77))
    for form in ("PNG", "WEBP"):
        assert decoder.decode(encoded(image, form, exif=exif), Want.PIXELS)[:2] == (7071, 7071)
    assert decoder.decode(encoded(image.convert("RGB"), "WEBP", quality=80), Want.PIXELS)[:2] == (7071, 7071)


# --- The program


def pid_of(decoder: Decoder) -> int:
    assert decoder._program is not None
    return decoder._program[0].pid


def test_an_image_that_takes_too_much_memory_is_refused_and_the_program_goes_on(decoder: Decoder) -> None:
    decoder.decode(drawing(0), Want.SIZE)
    pid = pid_of(decoder)
    # Its pixels take 64 MB.
    large = encoded(Image.new("1", (4000, 4000)))
    limits = resource.prlimit(pid, resource.RLIMIT_AS)
    assert limits == (MEMORY_BYTES, MEMORY_BYTES)
    resource.prlimit(pid, resource.RLIMIT_AS, (64 << 20, MEMORY_BYTES))
    with pytest.raises(DataError, match="MiB"):
        decoder.decode(large, Want.PIXELS)
    resource.prlimit(pid, resource.RLIMIT_AS, limits)
    assert decoder.decode(large, Want.SIZE)[:2] == (4000, 4000)
    assert decoder.decode(drawing(0), Want.SIZE)[:2] == (40, 24)
    assert pid_of(decoder) == pid


def test_an_image_that_keeps_the_program_busy_is_refused_and_it_starts_again(decoder: Decoder) -> None:
    decoder.decode(drawing(0), Want.SIZE)
    pid = pid_of(decoder)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DataError, match=r"within 0\.1 s"):
        decoder.decode(drawing(0), Want.SIZE, within_s=0.1)
    assert decoder.decode(drawing(0), Want.SIZE)[:2] == (40, 24)
    assert pid_of(decoder) != pid


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_image_that_kills_the_program_is_refused_and_it_starts_again(decoder: Decoder) -> None:
    decoder.decode(drawing(0), Want.SIZE)
    assert decoder._program is not None
    (process, peer), failures = decoder._program, list[str]()

    def decode() -> None:
        try:
            decoder.decode(drawing(0), Want.SIZE)
        except DataError as error:
            failures.append(str(error))

    def unread() -> bool:
        return struct.unpack("i", fcntl.ioctl(peer, termios.TIOCOUTQ, b"\0" * 4))[0] > 0

    os.kill(process.pid, signal.SIGSTOP)
    caller = threading.Thread(target=decode)
    caller.start()
    wait_until(unread)
    os.kill(process.pid, signal.SIGKILL)
    caller.join()
    assert len(failures) == 1 and "exit code -9" in failures[0]
    assert decoder.decode(drawing(0), Want.SIZE)[:2] == (40, 24)
    # Nothing is refused for a death between images.
    os.kill(pid_of(decoder), signal.SIGKILL)
    os.waitid(os.P_PID, pid_of(decoder), os.WEXITED | os.WNOWAIT)
    assert decoder.decode(drawing(0), Want.SIZE)[:2] == (40, 24)


def test_the_program_ends_with_its_client_and_loads_neither_torch_nor_numpy() -> None:
    script = f"""
from rl_async.picture_decoder import DECODER, Want
import os
DECODER.decode(bytes.fromhex({drawing(0).hex()!r}), Want.PIXELS)
pid = DECODER._program[0].pid
print(pid, any(name in open(f"/proc/{{pid}}/maps").read() for name in ("torch", "numpy")), flush=True)
os._exit(0)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True).stdout
    pid, loads = out.split()
    assert loads == "False"
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


FORKED = """
import os
from rl_async.picture_decoder import DECODER, Want
red, blue = (bytes.fromhex(data) for data in {images!r})
assert DECODER.decode(red, Want.SIZE)[:2] == (3, 2)
program = DECODER._program[0].pid
if (child := os.fork()) == 0:
    seen = DECODER.decode(blue, Want.SIZE)[:2] == (5, 4) and DECODER._program[0].pid != program
    DECODER.close()
    os._exit(0 if seen else 1)
assert os.waitpid(child, 0)[1] == 0
assert DECODER.decode(red, Want.SIZE)[:2] == (3, 2) and DECODER._program[0].pid == program
"""


def test_a_fork_has_a_program_of_its_own() -> None:
    images = [encoded(Image.new("RGB", size)).hex() for size in ((3, 2), (5, 4))]
    done = subprocess.run([sys.executable, "-c", FORKED.format(images=images)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
