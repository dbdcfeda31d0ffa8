"""Images of vision-language models: the tokens and the tower's inputs that stand for them.

``PictureProcessor`` turns an image, decoded by ``picture_decoder.py``, into a ``Picture`` by the model's own Hugging
Face image processor, and expands the marks that a chat template prints. Agent workers, engines
and the trainer all use it, so that every part of a run sees the same tokens and pixels. To add a family of models, add
it to ``FAMILIES``; its test compares it with the family's Hugging Face processor. Neither video nor audio is read.
"""

import asyncio
import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from rl_async.errors import DataError, UserError
from rl_async.model_files import TEXT_ALONE, read_object
from rl_async.picture_decoder import DECODER, Want

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bytes of encoded images that a processor keeps, and sizes of checked ones.
CACHE_BYTES = 256 << 20
CACHED_SIZES = 16_384
# The decoder takes one image at a time.
_DECODING = ThreadPoolExecutor(1, thread_name_prefix="images")


def read_picture(data: bytes) -> Image.Image:
    """Decode an image as RGB. Raises DataError as ``Decoder.decode`` does."""
    width, height, pixels = DECODER.decode(data, Want.PIXELS)
    return Image.frombytes("RGB", (width, height), pixels)


@dataclass(frozen=True)
class Picture:
    """An image as a model reads it.

    Attributes:
        tokens: The ids that stand for it in a prompt.
        inputs: The vision tower's arguments by name; ``PictureProcessor.arguments`` joins those of several images.
    """

    tokens: list[int]
    inputs: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens) + sum(array.nbytes for array in self.inputs.values())


class PictureProcessor:
    """Encodes images for one model. Its methods may be called from several threads.

    Attributes:
        mark: The id that a chat template prints where an image stands.
        image_token: The id within ``Picture.tokens`` whose embeddings the tower's features replace.
    """

    def __init__(self, model: str, family: "_Family", processor: Any) -> None:
        self._model, self._family, self._processor = model, family, processor
        self.mark, self.image_token = self._family.mark, self._family.image_token
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Picture] = OrderedDict()
        self._cached_bytes = 0
        # Of images known to be undamaged.
        self._sizes: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    @classmethod
    def load(cls, model: str) -> "PictureProcessor | None":
        """Load the processor of a model's folder; None if the model reads no images.

        Raises UserError if its family is not covered, or files of its processor are missing.
        """
        file = Path(model) / "config.json"
        stored = read_object(file, "model.path") if file.is_file() else {}
        kind = stored.get("model_type")
        if "vision_config" not in stored or kind in TEXT_ALONE:
            return None
        if kind not in FAMILIES:
            raise UserError(
                f"model.path={model}: images of models of type {kind} are not supported; use one of "
                f"{', '.join(FAMILIES)}"
            )
        # Their import takes a second, and most models read no images.
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

        try:
            # Torchvision's resampling differs from Pillow's in the last bits, so it would split a run's processes.
            processor = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"model.path={model}: cannot load its image processor: {error}") from error
        return cls(model, FAMILIES[kind](config, processor, tokenizer), processor)

    def encode(self, data: bytes) -> Picture:
        """Encode an image file. Raises DataError if it cannot be decoded, or the model does not take its shape."""
        key = hashlib.sha256(data).digest()
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return found
        image = read_picture(data)
        tokens = self._tokens(image.size)
        outputs = dict(self._processor(image, return_tensors="np", **self._family.options))
        picture = Picture(tokens, {name: self._family.input(name, outputs) for name in self._family.names})
        self._keep(key, image.size)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = picture
                self._cached_bytes += picture.nbytes
            while self._cached_bytes > CACHE_BYTES:
                _, oldest = self._cache.popitem(last=False)
                self._cached_bytes -= oldest.nbytes
        return picture

    def tokens(self, data: bytes, want: Want = Want.SIZE) -> list[int]:
        """Return the ids that stand for an image, which its size decides; raises DataError as ``encode`` does.

        With ``Want.HEADER``, the file is not decoded to see whether it is damaged.
        """
        if want == Want.HEADER:
            return self._tokens(DECODER.decode(data, want)[:2])
        key = hashlib.sha256(data).digest()
        with self._lock:
            size = self._sizes.get(key)
        if size is None:
            size = DECODER.decode(data, want)[:2]
            self._keep(key, size)
        return self._tokens(size)

    async def check(self, images: Sequence[bytes]) -> None:
        """Decode images outside the event loop, so that their tokens are known. Raises DataError as ``encode`` does."""
        for data in images:
            await asyncio.get_running_loop().run_in_executor(_DECODING, self.tokens, data)

    def _tokens(self, size: tuple[int, int]) -> list[int]:
        try:
            return self._family.tokens(*size)
        except ValueError as error:
            shown = f"{size[0]} x {size[1]}"
            raise DataError(f"the processor of {self._model} refuses an image of {shown} pixels: {error}") from error

    def _keep(self, key: bytes, size: tuple[int, int]) -> None:
        with self._lock:
            self._sizes[key] = size
            self._sizes.move_to_end(key)
            if len(self._sizes) > CACHED_SIZES:
                self._sizes.popitem(last=False)

    def expand(
        self, ids: Sequence[int], images: Sequence[bytes], want: Want = Want.SIZE
    ) -> tuple[list[int], list[int]]:
        """Replace each mark of a prompt by the tokens of its image (see ``tokens``), in order.

        Returns the ids, and the index of each image's first token. Raises DataError unless there is one image per mark.
        """
        expanded, _, positions = self.expand_row(ids, [False] * len(ids), images, want)
        return expanded, positions

    def expand_row(
        self, ids: Sequence[int], learned: Sequence[bool], images: Sequence[bytes], want: Want = Want.SIZE
    ) -> tuple[list[int], list[bool], list[int]]:
        """Expand a row as ``expand`` does, and whether each of its tokens is ``learned``; those of images are not."""
        marks = [place for place, token in enumerate(ids) if token == self.mark]
        if len(marks) != len(images):
            raise DataError(f"a prompt has {len(marks)} marks of images and {len(images)} images; give one per mark")
        expanded: list[int] = []
        flags: list[bool] = []
        positions: list[int] = []

        def add(tokens: Sequence[int], learned: Sequence[bool]) -> None:
            if self._family.join(expanded, tokens):
                # A newline of the text and one of the image are one token.
                flags[-1], learned = False, learned[1:]
            flags.extend(learned)

        start = 0
        for place, data in zip(marks, images, strict=True):
            add(ids[start:place], learned[start:place])
            tokens = self.tokens(data, want)
            add(tokens, [False] * len(tokens))
            positions.append(len(expanded) - len(tokens))
            start = place + 1
        add(ids[start:], learned[start:])
        return expanded, flags, positions

    def arguments(self, pictures: Sequence[Picture]) -> dict[str, np.ndarray]:
        """Join the inputs of one or more images as the model's ``get_image_features`` takes them."""
        joined = {name: np.concatenate([one.inputs[name] for one in pictures]) for name in pictures[0].inputs}
        return {name: array[None] if self._family.nested else array for name, array in joined.items()}

    def blank(self) -> dict[str, np.ndarray]:
        """Return ``arguments`` of a small white image, or of one tile of it."""
        file = io.BytesIO()
        Image.new("RGB", (32, 32), "white").save(file, "PNG")
        white = self.encode(file.getvalue())
        tiles = {name: array[:1] if self._family.nested else array for name, array in white.inputs.items()}
        return self.arguments([Picture(white.tokens, tiles)])

    def rope_positions(self, length: int, images: Sequence[tuple[int, Picture]]) -> np.ndarray | None:
        """Compute the rotary positions of a row of ``length`` tokens in time, height and width, int64 [3, length].

        ``images`` are in order, each with the index of its first token. Returns None for a model that counts tokens.
        The formula is M-RoPE's (Qwen2-VL, arXiv:2409.12191, section 2.1): an image's tokens stand at their row and
        column beyond the position before, and the text goes on behind the larger side.
        """
        if self._family.merge is None:
            return None
        steps, positions = np.ones(length, np.int64), np.zeros((3, length), np.int64)
        for start, picture in images:
            _, height, width = picture.inputs["image_grid_thw"][0] // (1, self._family.merge, self._family.merge)
            stop = start + height * width
            steps[start:stop] = 0
            steps[stop - 1] = max(height, width)
            grid = np.indices((1, height, width)).reshape(3, -1)
            positions[:, start:stop] = grid
        return positions + np.cumsum(steps) - steps


# --- Families of models


class _Family(NamedTuple):
    """How a family writes images.

    ``tokens`` makes an image's ids from its width and height; it raises ValueError for those that the image processor
    refuses. ``names`` are the outputs of this one that the tower reads, and ``options`` its arguments; ``nested``
    outputs have an axis for the prompt before that for its images. ``newlines`` has the id of each run of newlines that
    is one token, if such runs stand at the ends of an image, and ``merge`` the side of a square of patches that is one
    token, if positions follow rows and columns of an image.
    """

    mark: int
    image_token: int
    tokens: Callable[[int, int], list[int]]
    names: tuple[str, ...]
    options: Mapping[str, bool] = {}
    nested: bool = False
    newlines: Mapping[int, int] = {}
    merge: int | None = None

    def input(self, name: str, outputs: Mapping[str, Any]) -> np.ndarray:
        array = np.asarray(outputs[name])
        return array[0] if self.nested else array

    def join(self, ids: list[int], more: Sequence[int]) -> bool:
        """Append ids; return whether the first became one token with the last, as a tokenizer would have made it."""
        lengths = {token: length for length, token in self.newlines.items()}
        if ids and more and ids[-1] in lengths and more[0] in lengths:
            both = self.newlines.get(lengths[ids[-1]] + lengths[more[0]])
            if both is not None:
                ids[-1:] = [both, *more[1:]]
                return True
        ids.extend(more)
        return False


def _qwen(config: Any, processor: Any, _: "PreTrainedTokenizerBase") -> _Family:
    """Qwen2.5-VL and Qwen3-VL: one token for each ``merge_size`` x ``merge_size`` patches."""
    image, merge = config.image_token_id, processor.merge_size

    def tokens(width: int, height: int) -> list[int]:
        return [image] * (processor.get_number_of_image_patches(height, width) // merge**2)

    return _Family(image, image, tokens, ("pixel_values", "image_grid_thw"), merge=merge)


def _idefics(config: Any, processor: Any, tokenizer: "PreTrainedTokenizerBase") -> _Family:
    """Idefics3 and SmolVLM: tiles row by row, then the whole image, each of as many tokens as the tower has features.

    The layout is that of ``Idefics3Processor.replace_image_token``.
    """
    image, vision = config.image_token_id, config.vision_config
    features = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2

    def tokens(width: int, height: int) -> list[int]:
        _, rows, columns = processor.get_number_of_image_patches(height, width)
        mark, around = tokenizer.convert_ids_to_tokens(image), "<fake_token_around_image>"
        text = ""
        for row in range(rows):
            for column in range(columns):
                text += f"{around}<row_{row + 1}_col_{column + 1}>{mark}"
            text += "\n"
        text += ("\n" if rows else "") + f"{around}<global-img>{mark}{around}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [token for one in ids for token in ([one] * features if one == image else [one])]

    return _Family(image, image, tokens, ("pixel_values", "pixel_attention_mask"), nested=True)


def _gemma(config: Any, _: Any, tokenizer: "PreTrainedTokenizerBase") -> _Family:
    """Gemma 3: ``mm_tokens_per_image`` tokens between blank lines; crops of the image are not made.

    The layout is that of ``Gemma3Processor``. As in vLLM's ``gemma3_mm.py``, blank lines become one token with the
    newlines around them.
    """
    image, begin, end = config.image_token_index, config.boi_token_index, config.eoi_token_index
    runs = {length: tokenizer.encode("\n" * length, add_special_tokens=False) for length in range(1, 32)}
    tokens = [*runs[2], begin, *[image] * config.mm_tokens_per_image, end, *runs[2]]
    newlines = {length: ids[0] for length, ids in runs.items() if len(ids) == 1}
    # The family's processor turns crops off, whatever its image processor's file says.
    options = {"do_pan_and_scan": False}
    return _Family(begin, image, lambda *_: tokens.copy(), ("pixel_values",), options, newlines=newlines)


FAMILIES: dict[str, Callable[[Any, Any, Any], _Family]] = {
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "idefics3": _idefics,
    "smolvlm": _idefics,
    "gemma3": _gemma,
}
