"""Images in prompts: where they stand, and the embeddings and rotary positions that a model gives their tokens.

``place`` checks a request's images against its ids. ``VisionInputs`` has the decoder's arguments for a pass over
prompts with images. The tower computes an image again whenever a part of it is prefilled, so that no features of older
weights are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_async.errors import DataError
from rl_async.pictures import Picture, PictureProcessor
from rl_async.rollout_server.api import Image

# Families of vision-language models whose log-probabilities a test compares with a plain forward pass.
SERVED_WITH_IMAGES = ("gemma3", "idefics3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
# Of these, the ones in which tokens of an image see those behind them.
BIDIRECTIONAL = ("gemma3",)


@dataclass(frozen=True)
class PlacedImage:
    """An image in a prompt. ``features`` are the prompt's indices, ascending, whose embeddings the tower computes."""

    sha256: str
    position: int
    picture: Picture
    features: np.ndarray

    @property
    def end(self) -> int:
        """The index after its last token."""
        return self.position + len(self.picture.tokens)


def place(processor: PictureProcessor | None, ids: Sequence[int], images: Sequence[Image]) -> tuple[PlacedImage, ...]:
    """Encode the images of a prompt. Raises DataError unless ``ids`` has each image's tokens at its position, in order.

    Image tokens elsewhere in ``ids`` count as text: the policy may sample them.
    """
    if images and processor is None:
        raise DataError(f"the prompt has {len(images)} images, but this model reads none")
    placed: list[PlacedImage] = []
    starts, end = {image.position for image in images}, 0
    for image in images:
        assert processor is not None
        picture, start = processor.encode(image.data), image.position
        tokens, before, end = picture.tokens, end, start + len(picture.tokens)
        features = start + np.flatnonzero(np.asarray(tokens) == processor.image_token)
        # A newline beside the image may have become one token with the prompt's.
        fits = before <= start and list(ids[start + 1 : end - 1]) == tokens[1:-1] and end <= len(ids)
        longer = end not in starts and list(ids[end : end + 1]) == [processor.image_token]
        if not fits or longer or any(ids[index] != processor.image_token for index in features.tolist()):
            raise DataError(
                f"token_ids lacks the {len(tokens)} tokens of image {image.sha256[:12]} at position {start}; expand "
                "prompts with the processor of the model that the engine serves"
            )
        placed.append(PlacedImage(image.sha256, start, picture, features))
    return tuple(placed)


class VisionInputs:
    """The arguments that a vision-language model's decoder takes for prompts with images."""

    def __init__(self, model: Any, processor: PictureProcessor) -> None:
        self._model, self._embed, self._processor = model.model, model.get_input_embeddings(), processor

    def offset(self, images: Sequence[PlacedImage]) -> int:
        """Return the difference between the rotary position and the index of tokens behind the images."""
        if not images:
            return 0
        end = images[-1].end
        positions = self._rope_positions(images, end + 1)
        return 0 if positions is None else int(positions[0, end]) - end

    def positions(self, prompts: Sequence[tuple[Sequence[PlacedImage], int]], indices: Tensor) -> Tensor:
        """Return the rotary positions of the tokens at ``indices`` [N or 1, T], given images and length of each prompt.

        Their shape is that of ``indices``, or [3, N, T] if the model counts in time, height and width.
        """
        found: list[Tensor] = []
        for (images, length), row in zip(prompts, indices.cpu().expand(len(prompts), -1), strict=True):
            table = self._rope_positions(images, length)
            if table is None:
                return indices
            # Padding only needs valid positions.
            found.append(torch.from_numpy(table)[:, row.clamp(max=length - 1)])
        return torch.stack(found, 1).to(indices.device)

    def _rope_positions(self, images: Sequence[PlacedImage], length: int) -> np.ndarray | None:
        return self._processor.rope_positions(length, [(image.position, image.picture) for image in images])

    def inputs(self, tokens: Tensor, parts: Sequence[tuple[Sequence[PlacedImage], int]]) -> dict[str, Any]:
        """Return the decoder's arguments for ``tokens`` [N, T], given each prompt's images and first index in the pass.

        Images before that index are not computed.
        """
        computed: dict[str, list[Tensor]] = {}
        rows: list[int] = []
        columns: list[int] = []
        found: list[list[Tensor]] = []
        for row, (images, start) in enumerate(parts):
            for image in images:
                known = int(np.searchsorted(image.features, start))
                if known == len(image.features):
                    continue
                if image.sha256 not in computed:
                    computed[image.sha256] = self._features(image, tokens.device)
                found.append([layer[known:] for layer in computed[image.sha256]])
                rows += [row] * (len(image.features) - known)
                columns += (image.features[known:] - start).tolist()
        if not found:
            return {"input_ids": tokens}
        at = torch.tensor(rows, device=tokens.device), torch.tensor(columns, device=tokens.device)
        first, *deeper = (torch.cat(layers) for layers in zip(*found, strict=True))
        embedded = self._embed(tokens)
        embedded[at] = first.to(embedded.dtype)
        if not deeper:
            return {"inputs_embeds": embedded}
        visual = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        visual[at] = True
        return {"inputs_embeds": embedded, "visual_pos_masks": visual, "deepstack_visual_embeds": deeper}

    def _features(self, image: PlacedImage, device: torch.device) -> list[Tensor]:
        """Compute one image: embeddings [features, hidden], and those that Qwen3-VL adds after its first layers."""
        arguments = self._processor.arguments([image.picture])
        inputs = {name: torch.from_numpy(array).to(device) for name, array in arguments.items()}
        out = self._model.get_image_features(**inputs, return_dict=True)
        (features,) = out.pooler_output
        return [features, *(layer for (layer,) in getattr(out, "deepstack_features", None) or ())]
