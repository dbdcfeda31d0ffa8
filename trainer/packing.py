"""The rows of a micro-batch as a model reads them: padded, packed in one row, or as a tree of shared prefixes.

``collate`` makes padded ``Tensors``. ``pack`` drops the padding and puts results for the one row back in their places.
Rows of a group share their prompt, those of one episode a longer history, and all rows perhaps the opening of the chat
format. A causal model computes a token regardless of the tokens after it, so ``prefix_tree`` and ``pack_tree`` let
shared tokens stand once.

Images in a micro-batch: where its rows show them, and the embeddings that a vision tower puts in their place.

    rows' media ──> PictureProcessor ──> lay_images ──> Images ──> packed as tokens are ──> embedded ──> decoder

An image that several rows show is encoded by the tower once. A token is known by the feature that stands for it, so
rows share a prefix with images exactly if they show the same ones. Images are attended to by their own patches alone:
the towers of Transformers keep the borders of each, however many are passed together.

``Rows`` packs numbers per token of many rows: the rows are concatenated in tensors [M], without padding.

A long row among short ones then only costs its own tokens. Formulas take packed tensors with their ``Rows``, or padded
tensors [N, T] without ``Rows``, which are a micro-batch or the batch for users' functions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_async.errors import DataError
from rl_async.messages import Media, Trajectory
from rl_async.pictures import Picture, PictureProcessor
from rl_async.torch_shared import has_flash_attention, to_device
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


# A run of fewer tokens is not worth a node of its own, which costs every layer calls.
LEAST = 8


class Node(NamedTuple):
    """A run of tokens without a branch, [start, stop) of the tree's. Those of its descendants are [stop, end)."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class PrefixTree:
    """B rows as N tokens, ordered so that a node's descendants follow it.

    Rows of different temperatures share nothing, so that a token is predicted by one distribution.

    Attributes:
        nodes: The nodes, ordered by their start.
        places: Index of each token in the flattened batch.
        positions: Position of each token in its row.
        before: The token before each in its row, -1 for a row's first.
        paths: The tokens of each row, T_b of row b.
    """

    nodes: tuple[Node, ...]
    places: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N]
    before: np.ndarray  # int64 [N]
    paths: tuple[np.ndarray, ...]  # int64 [T_b]


def prefix_tree(
    tokens: np.ndarray,
    lengths: Sequence[int],
    temperatures: Sequence[float],
    least: int = LEAST,
    experts: np.ndarray | None = None,
    kept: np.ndarray | None = None,
) -> PrefixTree | None:
    """Find the prefixes that rows [B, T] share, or return None without any. Runs shorter than ``least`` are not shared.

    Tokens that went through other ``experts`` [B, T, layers, k], or were chosen from other ``kept`` tokens [B, T, K],
    are not the same.
    """
    building = _Building(least)
    paths: dict[int, np.ndarray] = {}
    places, befores = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    rows = [tokens[row, :length] for row, length in enumerate(lengths)]
    order = sorted(range(len(rows)), key=lambda row: (temperatures[row], rows[row].astype(">u4").tobytes()))
    path = np.empty(0, np.int64)
    for last, row in pairwise([None, *order]):
        assert row is not None
        alike = last is not None and temperatures[last] == temperatures[row]
        common = _common(rows[last], rows[row]) if alike and last is not None else 0
        for record in (experts, kept):
            if common and record is not None:
                differ = (record[last, :common] != record[row, :common]).reshape(common, -1).any(1)
                common = int(differ.argmax()) if differ.any() else common
        shared = building.add(len(rows[row]), common)
        new = np.arange(building.tokens - (len(rows[row]) - shared), building.tokens)
        path = paths[row] = np.concatenate([path[:shared], new])
        places.append(row * tokens.shape[1] + np.arange(shared, len(path)))
        befores.append(np.concatenate([[-1], path])[shared : len(path)])
    if building.tokens == sum(lengths):
        return None
    before = np.concatenate(befores)
    where = np.concatenate(places)
    return PrefixTree(
        nodes=building.finished(),
        places=where,
        positions=where % tokens.shape[1],
        before=before,
        paths=tuple(paths[row] for row in range(len(rows))),
    )


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Count the tokens at the beginning that both share."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


class _Building:
    """The nodes of a tree whose rows are added in lexicographic order; the open ones lead to the latest row's end."""

    def __init__(self, least: int) -> None:
        self.tokens = 0
        self._least = least
        # Start and stop, and the number of tokens before the node in a row.
        self._open: list[tuple[int, int, int]] = []
        self._closed: list[Node] = []

    def add(self, length: int, common: int) -> int:
        """Add a row that shares ``common`` tokens with the one before. Returns how many of them it does share."""
        while self._open and self._open[-1][2] >= common:
            self._close()
        shared = common
        if self._open:
            start, stop, above = self._open[-1]
            if common - above < self._least:
                self._close()
                shared = above
            elif stop - start > common - above:
                self._split(common - above)
        else:
            shared = 0
        if length > shared:
            self._open.append((self.tokens, self.tokens + length - shared, shared))
            self.tokens += length - shared
        return shared

    def _close(self) -> None:
        start, stop, _ = self._open.pop()
        self._closed.append(Node(start, stop, self.tokens))

    def _split(self, keep: int) -> None:
        """Cut the lowest open node after so many tokens; what follows is a closed child."""
        start, stop, above = self._open.pop()
        self._closed.append(Node(start + keep, stop, self.tokens))
        self._open.append((start, start + keep, above))

    def finished(self) -> tuple[Node, ...]:
        while self._open:
            self._close()
        return tuple(sorted(self._closed))


class Tensors(msgspec.Struct):
    """A micro-batch, padded on the right. B rows, T = longest row; position t stands for token t+1.

    Attention needs no mask: padding stands behind every real token, where causal attention never looks.

    Attributes:
        lengths: Number of real tokens of each row, on the host.
        mask: Whether token t+1 is trained.
        tree: The prefixes that rows share, for a model that computes them once.
        experts: The experts that the engines chose, -1 where they were not recorded; on the host.
        images: The images that rows show; None without any.
        kept: The tokens that a token was chosen from, padded with -1; all -1 where sampling was not truncated.
    """

    tokens: Tensor  # int64 [B, T]
    lengths: Tensor  # int64 [B]
    mask: Tensor  # bool [B, T-1]
    temperature: Tensor  # float32 [B, 1, 1]
    tree: PrefixTree | None = None
    experts: Tensor | None = None  # int16 [B, T, layers, k]
    images: Images | None = None
    kept: Tensor | None = None  # int64 [B, T, K]
    # The results of ``packed`` with prefixes shared and apart; None if they are not kept.
    packings: "dict[bool, Packed | PackedTree] | None" = None

    def packed(self, shares_prefixes: bool) -> "Packed | PackedTree":
        """Put the tokens into one row, or into a tree if rows share prefixes and ``shares_prefixes``.

        With ``packings``, an empty dictionary at first, later calls get the same result: nothing else may change then.
        """
        tree = self.tree if shares_prefixes else None
        if self.packings is not None and (tree is not None) in self.packings:
            return self.packings[tree is not None]
        made = pack(self) if tree is None else pack_tree(self, tree)
        if self.packings is not None:
            self.packings[tree is not None] = made
        return made

    @property
    def computed(self) -> int:
        """Tokens that a pass goes through; padding is not counted."""
        return int(self.lengths.sum()) if self.tree is None else len(self.tree.places)


def collate(
    rows: Sequence[Trajectory],
    *,
    device: str,
    mask: Tensor | None = None,
    share_prefixes: bool = False,
    replay_routers: bool = False,
    images: Images | None = None,
) -> Tensors:
    """Pad rows to a micro-batch on ``device``. ``mask`` [B, T-1] has the tokens that train, by default all sampled;
    ``images`` are those of the rows.

    Raises DataError if rows whose routers are to be replayed name experts of different models, or if a row of a
    truncating sampler does not name the tokens that were kept.
    """
    shape = len(rows), max(max(len(row.token_ids) for row in rows), 2)
    tokens, sampled = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.token_ids)], sampled[i, : len(row.token_ids)] = row.token_ids, row.loss_mask
    experts = _experts(rows, shape[1]) if replay_routers else None
    kept = _kept(rows, shape[1])
    # Tokens that show different images are different, and positions follow from the images before.
    known = (
        tokens
        if images is None
        else np.where((shown := images.features.cpu().numpy()) < 0, tokens, FIRST_FEATURE + shown)
    )
    lengths, temperatures = zip(*((len(row.token_ids), row.sampling.temperature or 1.0) for row in rows), strict=True)
    return Tensors(
        tokens=to_device(torch.from_numpy(tokens), device),
        lengths=torch.tensor(lengths),
        mask=to_device(torch.from_numpy(sampled[:, 1:]) if mask is None else mask, device),
        temperature=to_device(torch.tensor(temperatures), device)[:, None, None],
        tree=prefix_tree(known, lengths, temperatures, experts=experts, kept=kept) if share_prefixes else None,
        experts=None if experts is None else torch.from_numpy(experts),
        images=images,
        kept=None if kept is None else to_device(torch.from_numpy(kept), device),
    )


def _kept(rows: Sequence[Trajectory], width: int) -> np.ndarray | None:
    """Pad the tokens that each token of the rows was chosen from, int64 [B, width, K], with -1; None without any."""
    for row in rows:
        if row.sampling.truncating and row.kept_tokens is None and row.loss_mask.any():
            raise DataError(
                f"group {row.group_id} sample {row.sample} was sampled with top_p={row.sampling.top_p:g}, "
                f"top_k={row.sampling.top_k} and min_p={row.sampling.min_p:g} and does not name the tokens that were "
                "kept, so its log-probabilities cannot be compared; sample with rollout.truncation"
            )
    most = max((row.kept_tokens.shape[1] for row in rows if row.kept_tokens is not None), default=0)
    if not most:
        return None
    kept = np.full((len(rows), width, most), -1, np.int64)
    for padded, row in zip(kept, rows, strict=True):
        if row.kept_tokens is not None:
            padded[np.flatnonzero(row.loss_mask), : row.kept_tokens.shape[1]] = row.kept_tokens
    return kept


def _experts(rows: Sequence[Trajectory], width: int) -> np.ndarray | None:
    """Pad the rows' records of experts, int16 [B, width, layers, k], with -1, or return None without any.

    Raises DataError if they are not of one model.
    """
    recorded = [(i, row.routed_experts) for i, row in enumerate(rows) if row.routed_experts is not None]
    if not recorded:
        return None
    shapes = {experts.shape[1:] for _, experts in recorded}
    if len(shapes) > 1:
        raise DataError(f"rows of one batch name experts of models with [layers, experts per token] {sorted(shapes)}")
    experts = np.full((len(rows), width, *shapes.pop()), -1, np.int16)
    for i, record in recorded:
        experts[i, : len(record)] = record
    return experts


def empty_tensors(device: str) -> Tensors:
    """Make a micro-batch that trains nothing, for a rank that has to join a forward pass without rows."""
    return Tensors(
        tokens=torch.zeros((1, 2), dtype=torch.int64, device=device),
        lengths=torch.tensor([2]),
        mask=torch.zeros((1, 1), dtype=torch.bool, device=device),
        temperature=torch.ones((1, 1, 1), device=device),
    )


# A row's longest sequence is rounded up to a power of two, at least this one: compiled layers and kernels depend on it,
# and there are few such numbers.
LEAST_LONGEST = 1024


@dataclass
class RowCalls:
    """How the sequences of a packed row attend, each to itself. Not frozen: torch.compile would read all of a frozen
    dataclass, and compile layers anew for other groups.

    Attributes:
        groups: (length, sequences) of equally long sequences that stand side by side.
        borders: Where sequences begin and end, int32 [B + 1], on the device.
        host_borders: The same on the host.
        longest: Tokens of the longest sequence, or some more.
        has_kernel: Whether the device has PyTorch's FlashAttention for rows of several sequences.
    """

    groups: tuple[tuple[int, int], ...]
    borders: Tensor
    host_borders: Tensor
    longest: int
    has_kernel: bool


def row_calls(groups: tuple[tuple[int, int], ...], device: torch.device) -> RowCalls:
    """Describe a row of ``groups``, (length, sequences) each."""
    lengths = [0, *(length for length, sequences in groups for _ in range(sequences))]
    borders = torch.tensor(lengths).cumsum(0, dtype=torch.int32)
    longest = max(LEAST_LONGEST, 1 << (max(lengths) - 1).bit_length())
    return RowCalls(groups, to_device(borders, device), borders, longest, has_flash_attention(device))


@dataclass(frozen=True)
class Reading:
    """Some rows of a micro-batch as one teacher reads them, perhaps behind a hint.

    ``places`` are their places in the micro-batch, int64 [b], and ``shift``, int64 [b], says how much later their
    tokens stand in the teacher's rows; both are on the host. Without rows, ``tensors`` are those of an empty pass.
    """

    tensors: Tensors
    places: Tensor
    shift: Tensor

    def aligned(self, values: Tensor, width: int) -> Tensor:
        """Return a teacher's values [b, T', ...] in the rows' own places, [b, width, ...].

        Those of tokens in front of a hint, and behind a row, are meaningless.
        """
        values = values[: len(self.places)]
        if values.shape[1] == width and not self.shift.any():
            return values
        columns = (torch.arange(width) + self.shift[:, None]).clamp(max=values.shape[1] - 1).to(values.device)
        return values[torch.arange(len(columns), device=values.device)[:, None], columns]


@dataclass(frozen=True)
class Packed:
    """The N real tokens of a micro-batch in one row, longest sequence first; position n stands for the token after it.

    Attributes:
        positions: Position of each token in its sequence, from 0.
        groups: (length, sequences) of equally long sequences that stand side by side.
        targets: The token that follows, 0 where a sequence ends.
        predicts: The M positions that a token follows.
        places: Index of these in the flattened results, [B, T-1].
        shape: B and T-1.
        experts: The experts to replay, -1 to leave a token to the router.
        images: The images that tokens show.
        kept: The tokens that the target was chosen from, as in ``Tensors``.
    """

    tokens: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]
    groups: tuple[tuple[int, int], ...]
    targets: Tensor  # int64 [N]
    temperature: Tensor  # float32 [N]
    predicts: Tensor  # int64 [M]
    places: Tensor  # int64 [M]
    shape: tuple[int, int]
    experts: Tensor | None = None  # int16 [N, layers, k]
    images: Images | None = None
    kept: Tensor | None = None  # int64 [N, K]

    @cached_property
    def calls(self) -> RowCalls:
        """Describe to attention how the row's sequences attend, each to itself."""
        return row_calls(self.groups, self.tokens.device)

    def backbone_inputs(self) -> dict[str, Any]:
        """Arguments of a decoder of Transformers; our attention reads ``packed_row``."""
        return {"input_ids": self.tokens, "position_ids": self.positions, "use_cache": False, "packed_row": self.calls}

    def share(self, rank: int, ranks: int) -> "Packed":
        """Take one rank's N / ranks tokens of the row, which is filled up to a multiple by a sequence whose outputs are
        dropped. ``groups``, and where tokens belong, stay those of the whole row: attention is over all of it."""
        missing = -self.tokens.shape[1] % ranks
        size = (self.tokens.shape[1] + missing) // ranks
        mine = slice(rank * size, (rank + 1) * size)
        return replace(
            self,
            tokens=pad(self.tokens, (0, missing))[:, mine],
            positions=pad(self.positions, (0, missing))[:, mine],
            groups=(*self.groups, (missing, 1)) if missing else self.groups,
            targets=pad(self.targets, (0, missing))[mine],
            temperature=pad(self.temperature, (0, missing), value=1.0)[mine],
            experts=None if self.experts is None else pad(self.experts, (0, 0, 0, 0, 0, missing), value=-1)[mine],
            kept=None if self.kept is None else pad(self.kept, (0, 0, 0, missing), value=-1)[mine],
        )

    def predicting(self, hidden: Tensor) -> Tensor:
        """The hidden states [N, H] that predict the targets: all; those at a sequence's end count for nothing."""
        return hidden

    def unpack(self, flat: Tensor) -> Tensor:
        """[N, ...] to [B, T-1, ...], 0 where no token is predicted."""
        rows, width = self.shape
        empty = flat.new_zeros(rows * width, *flat.shape[1:])
        return empty.index_copy(0, self.places, flat.index_select(0, self.predicts)).unflatten(0, self.shape)


def pack(batch: Tensors) -> Packed:
    """Drop the padding. The order of rows only affects how many are attended to in one call."""
    rows, width = batch.tokens.shape
    lengths, order = batch.lengths.sort(descending=True, stable=True)
    total = int(lengths.sum())
    row = order.repeat_interleave(lengths)
    position = torch.arange(total) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    predicts = (position + 1 < lengths.repeat_interleave(lengths)).nonzero()[:, 0]
    places = (row * (width - 1) + position)[predicts]
    sizes, counts = lengths.unique_consecutive(return_counts=True)

    device = batch.tokens.device
    source = row * width + position
    experts = None if batch.experts is None else to_device(batch.experts.flatten(0, 1).index_select(0, source), device)
    source, predicts, row = (to_device(index, device) for index in (source, predicts, row))
    tokens = batch.tokens.flatten().index_select(0, source)
    kept = None
    if batch.kept is not None:
        chosen_from = batch.kept.flatten(0, 1).index_select(0, source)
        kept = torch.full_like(chosen_from, -1).index_copy(0, predicts, chosen_from.index_select(0, predicts + 1))
    return Packed(
        tokens=tokens[None],
        positions=to_device(position, device)[None],
        groups=tuple(zip(sizes.tolist(), counts.tolist(), strict=True)),
        targets=torch.zeros_like(tokens).index_copy(0, predicts, tokens.index_select(0, predicts + 1)),
        temperature=batch.temperature.flatten().index_select(0, row),
        predicts=predicts,
        places=to_device(places, device),
        shape=(rows, width - 1),
        experts=experts,
        images=None if batch.images is None else batch.images.packed(source),
        kept=kept,
    )


@dataclass(frozen=True)
class TreeCalls:
    """How the tokens of a packed tree attend, call by call; indexes are on the device.

    Attributes:
        longest: Tokens of the longest path.
        own: For each length L the tokens of its S nodes, int64 [S * L].
        over: (start, stop, end) of each node whose tokens [start, stop) are seen by its descendants, [stop, end).
        paths: For nodes of one length and depth their tokens, int64 [S, L], and their paths from the root, [S, K].
        rows: The paths from the root to the leaves, int64 [S, K] for those of one length; every token is on one.
        first: For each token a place of it among the flattened ``rows``, int64 [N].
        borders: Where nodes begin and end, int32, and of each call of ``over`` where its queries and its keys do.
        longest_node: Tokens of the longest node.
    """

    longest: int
    own: tuple[tuple[int, Tensor], ...]
    over: tuple[tuple[int, int, int], ...]
    paths: tuple[tuple[Tensor, Tensor], ...]
    rows: tuple[Tensor, ...]
    first: Tensor
    borders: Tensor
    over_borders: tuple[tuple[Tensor, Tensor], ...]
    longest_node: int


@dataclass(frozen=True)
class PackedTree:
    """The N tokens of a tree in one row, and the M predictions of a next token that rows make with them.

    Attributes:
        predictors: The token whose hidden state makes each prediction.
        targets: The token that is predicted.
        predictions: For every token of a row but its first, the number of its prediction.
        places: Index of these tokens in the flattened results, [B, T-1].
        shape: B and T-1.
        experts: The experts to replay, -1 to leave a token to the router.
        images: The images that tokens show.
        kept: The tokens that the target was chosen from, as in ``Tensors``.
    """

    tokens: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]
    calls: TreeCalls
    predictors: Tensor  # int64 [M]
    targets: Tensor  # int64 [M]
    temperature: Tensor  # float32 [M]
    predictions: Tensor  # int64 [K]
    places: Tensor  # int64 [K]
    shape: tuple[int, int]
    experts: Tensor | None = None  # int16 [N, layers, k]
    images: Images | None = None
    kept: Tensor | None = None  # int64 [M, K]

    def backbone_inputs(self) -> dict[str, Any]:
        """Arguments of a decoder of Transformers; our attention reads ``packed_tree``."""
        return {"input_ids": self.tokens, "position_ids": self.positions, "use_cache": False, "packed_tree": self.calls}

    def predicting(self, hidden: Tensor) -> Tensor:
        """The hidden states [M, H] that predict the targets, of all [N, H]. One may predict several."""
        return hidden.index_select(0, self.predictors)

    def unpack(self, flat: Tensor) -> Tensor:
        """[M, ...] to [B, T-1, ...], 0 where no token is predicted."""
        rows, width = self.shape
        empty = flat.new_zeros(rows * width, *flat.shape[1:])
        return empty.index_copy(0, self.places, flat.index_select(0, self.predictions)).unflatten(0, self.shape)


def pack_tree(batch: Tensors, tree: PrefixTree) -> PackedTree:
    """Put each token of ``tree``, which is that of the rows of ``batch``, into one row."""
    (rows, width), device = batch.tokens.shape, batch.tokens.device
    first = tree.before < 0
    # The number of the prediction of each token that is not a first one.
    order = np.cumsum(~first) - 1
    followers = [path[1:] for path in tree.paths]
    cells = [row * (width - 1) + np.arange(len(path)) for row, path in enumerate(followers)]

    def on_device(numbers: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(numbers), device)

    source = on_device(tree.places)
    tokens = batch.tokens.flatten().index_select(0, source)
    predicted = on_device(np.flatnonzero(~first))
    return PackedTree(
        tokens=tokens[None],
        positions=on_device(tree.positions)[None],
        calls=tree_calls(tree, device),
        predictors=on_device(tree.before[~first]),
        targets=tokens.index_select(0, predicted),
        temperature=batch.temperature.flatten().index_select(0, source.index_select(0, predicted) // width),
        predictions=on_device(order[np.concatenate(followers)]),
        places=on_device(np.concatenate(cells)),
        shape=(rows, width - 1),
        experts=None if batch.experts is None else on_device(batch.experts.flatten(0, 1).numpy()[tree.places]),
        images=None if batch.images is None else batch.images.packed(source),
        kept=None if batch.kept is None else batch.kept.flatten(0, 1)[source[predicted]],
    )


def tree_calls(tree: PrefixTree, device: torch.device) -> TreeCalls:
    """Group the nodes of a tree by size."""
    starts: dict[int, list[int]] = {}
    for node in tree.nodes:
        starts.setdefault(node.stop - node.start, []).append(node.start)
    paths: dict[tuple[int, int], list[Tensor]] = {}
    leaves: dict[int, list[Tensor]] = {}
    for node, (length, path) in zip(tree.nodes, _paths(tree), strict=True):
        paths.setdefault((length, len(path)), []).append(path)
        if node.end == node.stop:
            leaves.setdefault(len(path), []).append(path)
    stacked = [(length, to_device(torch.stack(same), device)) for (length, _), same in sorted(paths.items())]
    rows = [torch.stack(same) for _, same in sorted(leaves.items(), reverse=True)]
    first = np.unique(torch.cat([same.flatten() for same in rows]).numpy(), return_index=True)[1]
    over = tuple((node.start, node.stop, node.end) for node in tree.nodes if node.end > node.stop)

    def borders(*places: int) -> Tensor:
        return to_device(torch.tensor(places, dtype=torch.int32), device)

    return TreeCalls(
        longest=int(tree.positions.max()) + 1,
        own=tuple(
            (length, to_device((torch.tensor(those)[:, None] + torch.arange(length)).flatten(), device))
            for length, those in sorted(starts.items(), reverse=True)
        ),
        over=over,
        paths=tuple((same[:, -length:], same) for length, same in stacked),
        rows=tuple(to_device(same, device) for same in rows),
        first=to_device(torch.from_numpy(first), device),
        borders=borders(*(node.start for node in tree.nodes), len(tree.places)),
        over_borders=tuple((borders(0, end - stop), borders(0, stop - start)) for start, stop, end in over),
        longest_node=max(starts),
    )


def _paths(tree: PrefixTree) -> Iterator[tuple[int, Tensor]]:
    """Yield each node's length, and its path: the tokens from the root's first to its own last."""
    # The ends and the paths of the nodes around this one.
    above: list[tuple[int, Tensor]] = []
    for start, stop, end in tree.nodes:
        while above and above[-1][0] <= start:
            above.pop()
        path = torch.arange(start, stop)
        path = torch.cat([above[-1][1], path]) if above else path
        yield stop - start, path
        if end > stop:
            above.append((end, path))


# ``by_rows`` passes at most this many padded positions at once, unless a single row is longer.
PART = 1 << 18


@dataclass(frozen=True)
class Rows:
    """The places of N rows in packed tensors of M tokens."""

    lengths: Tensor  # int64 [N]

    @cached_property
    def starts(self) -> Tensor:
        """The position of each row's first token, int64 [N]."""
        return self.lengths.cumsum(0) - self.lengths

    def positions(self, rows: Sequence[int] | Tensor) -> Tensor:
        """Return the positions of the tokens of these rows, in this order, int64 [m]."""
        lengths = self.lengths[rows]
        shifts = self.starts[rows] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)

    def there(self, rows: Sequence[int] | Tensor, width: int) -> Tensor:
        """Return the positions of padded rows that are tokens, bool [B, width]."""
        return torch.arange(width) < self.lengths[rows][:, None]

    def pad(self, values: Tensor, rows: Sequence[int] | Tensor, width: int | None = None, fill: float = 0) -> Tensor:
        """Copy these rows from packed values [M], padded on the right to [B, width], by default to the longest row."""
        there = self.there(rows, max(int(self.lengths[rows].max()), 1) if width is None else width)
        padded = values.new_full(there.shape, fill)
        padded[there] = values[self.positions(rows)]
        return padded

    def pad_all(self, values: Tensor, fill: float = 0) -> Tensor:
        """Pad all rows of packed values [M] to the longest, [N, T]."""
        return self.pad(values, torch.arange(len(self.lengths)), fill=fill)

    def pack(self, padded: Tensor) -> Tensor:
        """Undo ``pad_all``."""
        return padded[self.there(torch.arange(len(self.lengths)), padded.shape[1])]

    def similar(self) -> Iterator[Tensor]:
        """Yield the indexes of all rows in parts of similar length, so that padded parts contain little padding."""
        order = self.lengths.argsort(descending=True, stable=True)
        lengths = self.lengths[order].tolist()
        start = 0
        for end in range(1, len(lengths) + 1):
            longest = max(lengths[start], 1)
            if end == len(lengths) or 2 * lengths[end] < longest or (end + 1 - start) * longest > PART:
                yield order[start:end]
                start = end


def row_sums(values: Tensor, rows: Rows | None) -> Tensor:
    """Sum the values of each row in float64, [N]."""
    if rows is None:
        return values.sum(1, dtype=torch.float64)
    index = torch.arange(len(rows.lengths)).repeat_interleave(rows.lengths)
    return torch.zeros(len(rows.lengths), dtype=torch.float64).index_add_(0, index, values.double())


def on_tokens(values: Tensor, rows: Rows | None) -> Tensor:
    """Repeat a value per row [N] for each of its tokens, [M]; for padded rows return [N, 1], which broadcasts."""
    return values[:, None] if rows is None else values.repeat_interleave(rows.lengths)


def by_rows(function: Callable[..., tuple[Tensor, ...]], rows: Rows | None, *values: Tensor) -> tuple[Tensor, ...]:
    """Apply a function of padded tensors [B, T] whose results, [B, T] or [B, 1], only depend on their own row.

    It gets packed values [M] in padded parts, which bounds the memory for padding, and its results are packed.
    """
    if rows is None:
        return function(*values)
    whole = list[Tensor]()
    for part in rows.similar():
        padded = [rows.pad(tensor, part) for tensor in values]
        there, positions = rows.there(part, padded[0].shape[1]), rows.positions(part)
        results = function(*padded)
        whole = whole or [torch.zeros_like(values[0], dtype=result.dtype) for result in results]
        for tensor, result in zip(whole, results, strict=True):
            tensor[positions] = result.expand(there.shape)[there]
    return tuple(whole)
