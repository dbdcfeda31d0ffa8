"""Images in a micro-batch: where its rows show them, and the embeddings that a vision tower puts in their place.

    rows' media ──> PictureProcessor ──> lay_images ──> Images ──> packed as tokens are ──> embedded ──> decoder

An image that several rows show is encoded by the tower once. A token is known by the feature that stands for it, so
rows share a prefix with images exactly if they show the same ones. Images are attended to by their own patches alone:
the towers of Transformers keep the borders of each, however many are passed together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_async.errors import DataError
from rl_async.messages import Media, Trajectory
from rl_async.pictures import Picture, PictureProcessor
from rl_async.trainer.batch_layout import Shown
from rl_async.trainer.families import BIDIRECTIONAL

# Beyond the ids of any vocabulary, and within 32 bits.
FIRST_FEATURE = 1 << 31


@dataclass
class ImageRow:
    """A row of a data set, with the fields of a Trajectory that images need. ``key`` names it in errors."""

    key: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    media: list[Media]


@dataclass(frozen=True)
class Images:
    """The images of a micro-batch.

    Attributes:
        inputs: The tower's arguments for all distinct images, on the host.
        features: The number of the tower's output that replaces each token's embedding, -1 to keep it; padded, int64
            [B, T], or packed, [1, N].
        positions: Rotary positions in time, height and width, int64 [3, B, T] or [3, 1, N]. If None, the model counts
            tokens.
    """

    inputs: Mapping[str, Tensor]
    features: Tensor
    positions: Tensor | None

    def shown(self, side: int) -> Shown:
        """Return the size of the distinct images, whose patches have ``side`` pixels a side."""
        if (grids := self.inputs.get("image_grid_thw")) is not None:
            each = [int(grid.prod()) for grid in grids]
        else:
            pixels = self.inputs["pixel_values"]
            height, width = pixels.shape[-2:]
            each = [height * width // side**2] * (pixels.numel() // (3 * height * width))
        return Shown(sum(each), sum(count**2 for count in each), int(self.features.max()) + 1)

    def packed(self, source: Tensor) -> "Images":
        """Select the tokens at ``source``, int64 [N], of the flattened batch."""
        features, positions = self.features, self.positions
        return replace(
            self,
            features=features.flatten().index_select(0, source)[None],
            positions=None if positions is None else positions.flatten(1).index_select(1, source)[:, None],
        )


def lay_images(
    rows: Sequence[Trajectory | ImageRow], media: Mapping[str, bytes], processor: PictureProcessor | None, device: str
) -> Images | None:
    """Find the images of rows, padded to [B, T] as ``collate`` does; None without any. ``media`` has bytes by SHA-256.

    Raises DataError, naming the row, if it has media that the model cannot read, or other tokens than its processor
    makes of them.
    """
    if not any(row.media for row in rows):
        return None
    if processor is None:
        row = next(row for row in rows if row.media)
        raise DataError(f"row {row.key} shows {row.media[0].mime}, and the model at model.path reads no images")
    width = max(max(len(row.token_ids) for row in rows), 2)
    features = np.full((len(rows), width), -1, np.int64)
    positions: list[np.ndarray] = []
    # The distinct images, each with the number of its first feature.
    first: dict[str, int] = {}
    pictures: list[Picture] = []
    count = 0
    for number, row in enumerate(rows):
        shown: list[tuple[int, Picture]] = []
        end = 0
        for medium in sorted(row.media, key=lambda each: each.position):
            picture = _picture(row, medium, media, processor, end)
            end = medium.position + len(picture.tokens)
            places = medium.position + np.flatnonzero(np.array(picture.tokens) == processor.image_token)
            if medium.sha256 not in first:
                first[medium.sha256] = count
                pictures.append(picture)
                count += len(places)
            features[number, places] = first[medium.sha256] + np.arange(len(places))
            shown.append((medium.position, picture))
        rope = processor.rope_positions(len(row.token_ids), shown)
        if rope is not None:
            positions.append(np.pad(rope, ((0, 0), (0, width - len(row.token_ids)))))
    return Images(
        inputs={name: torch.from_numpy(array) for name, array in processor.arguments(pictures).items()},
        features=torch.from_numpy(features).to(device),
        positions=torch.from_numpy(np.stack(positions, 1)).to(device) if positions else None,
    )


def _picture(
    row: Trajectory | ImageRow, medium: Media, media: Mapping[str, bytes], processor: PictureProcessor, end: int
) -> Picture:
    """Encode an image. Raises DataError unless its tokens stand where the medium says, untrained, and past ``end``."""
    where = f"row {row.key}, token {medium.position}: {medium.mime} {medium.sha256[:12]}"
    if not medium.mime.startswith("image/"):
        raise DataError(f"{where} cannot be trained: models read images, neither video nor audio")
    picture = processor.encode(media[medium.sha256])
    span = slice(medium.position, medium.position + len(picture.tokens))
    stands = np.array(picture.tokens) == processor.image_token
    there = np.array_equal(row.token_ids[span] == processor.image_token, stands)
    if not there or row.loss_mask[span].any() or medium.position < end:
        raise DataError(
            f"{where} is not there as the processor of model.path expands it; were the rows made for another model?"
        )
    return picture


def embedded(lm: Any, tokens: Tensor, images: Images) -> dict[str, Tensor | list[Tensor]]:
    """Run the tower; return arguments of the decoder in place of ``tokens`` [B, T], with the images' features in them.

    Every parameter of the tower is part of the result's graph, even if no token shows an image.
    """
    embeddings = lm.get_input_embeddings()(tokens)
    device = embeddings.device
    seen = lm.base_model.get_image_features(
        **{name: array.to(device) for name, array in images.inputs.items()}, return_dict=True
    )
    shown = images.features >= 0
    numbers, places = images.features[shown], shown.flatten().nonzero()[:, 0]
    features = _joined(seen.pooler_output).index_select(0, numbers).to(embeddings.dtype)
    arguments: dict[str, Tensor | list[Tensor]] = {
        "inputs_embeds": embeddings.flatten(0, 1).index_copy(0, places, features).view_as(embeddings)
    }
    if images.positions is not None:
        arguments["position_ids"] = images.positions
    # Qwen3-VL adds features of lower layers of the tower after its first layers (DeepStack, arXiv:2406.04334).
    if (deep := getattr(seen, "deepstack_features", None)) is not None:
        arguments["visual_pos_masks"] = shown
        arguments["deepstack_visual_embeds"] = [_joined(part).index_select(0, numbers) for part in deep]
    if lm.config.model_type in BIDIRECTIONAL:
        arguments["token_type_ids"] = shown.long()
    return arguments


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features of all images, [F, H], of one tensor for each or of one for all."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.flatten(0, -2) for part in parts])
