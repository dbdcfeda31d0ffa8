"""Assigns a batch's rows to ranks and forward passes, as a pure function of the headers.

Every rank sees the headers of the whole batch, so all ranks compute the same layout without communicating. Shares are
equal by ``RowCost``, the operations that a model needs for a row, and dealt out by the largest differencing method.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from rl_async.configs.schema.run import RunConfig
from rl_async.messages import TrajectoryHeader, VersionRun
from rl_async.model_files import experts_of


class Shown(NamedTuple):
    """How much the distinct images of micro-batches are: patches, pairs of patches of one image, and features."""

    patches: int = 0
    pairs: int = 0
    features: int = 0


@dataclass(frozen=True)
class TowerCost:
    """Floating-point operations of a vision tower's forward pass: of a patch, of a pair of patches of one image, and of
    a feature, which replaces a token's embedding. ``side`` is that of a patch in pixels."""

    patch: int
    pair: int
    feature: int
    side: int
    trains: bool = False

    def of(self, shown: Shown) -> int:
        """Operations of a forward pass over images. Windows count as full attention."""
        return self.patch * shown.patches + self.pair * shown.pairs + self.feature * shown.features


@dataclass(frozen=True)
class RowCost:
    """A row of T tokens costs linear * T + quadratic * T^2; ``padded`` rows are computed as long as the longest, and
    rows with ``shares_prefixes`` cost only what comes after the prompt that another row of their group has."""

    linear: int = 1
    quadratic: int = 0
    padded: bool = False
    shares_prefixes: bool = False
    # Of the images that rows show.
    tower: TowerCost | None = None

    def of(self, tokens: int) -> int:
        """Floating-point operations of a forward pass over one row, up to the factor that both terms share."""
        return self.linear * tokens + self.quadratic * tokens * tokens


def row_cost_of(
    config: Any, *, padded: bool = False, shares_prefixes: bool = False, tower: TowerCost | None = None
) -> RowCost:
    """Derive a decoder's cost per row from its Hugging Face config.

    Linear: 2 operations per weight that a token uses, the chosen experts' and the last layer's included. Quadratic:
    scores and their sum over values, 2 operations per head and element each, for the T^2 / 2 pairs under the diagonal
    (Narayanan et al., arXiv:2104.04473, appendix, with causal attention). A sliding window counts as full attention.
    """
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    # The heads of some models differ from layer to layer.
    each = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * layers
    latent = getattr(config, "kv_lora_rank", None) is not None
    costs = [_latent_attention(layer) if latent else _attention(layer) for layer in each]
    dense, sparse = _mlp_layers(config)
    weights = sum(attention for attention, _ in costs) + dense * 3 * hidden * getattr(config, "intermediate_size", 0)
    weights += sparse * _expert_weights(config) + hidden * config.vocab_size
    return RowCost(
        linear=2 * weights,
        quadratic=heads * sum(score_width for _, score_width in costs),
        padded=padded,
        shares_prefixes=shares_prefixes,
        tower=tower,
    )


def _attention(config: Any) -> tuple[int, int]:
    """Weights of one layer's projections, and elements per head and pair of scores and values."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.hidden_size * width * (heads + kv_heads), 2 * width


def _latent_attention(config: Any) -> tuple[int, int]:
    """The same for DeepSeek's multi-head latent attention (arXiv:2412.19437, section 2.1.1)."""
    hidden, heads, rank, value = (
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.v_head_dim,
    )
    scored = config.qk_nope_head_dim + config.qk_rope_head_dim
    query = config.q_lora_rank
    weights = heads * scored * hidden if query is None else query * (hidden + heads * scored)
    weights += hidden * (rank + config.qk_rope_head_dim) + rank * heads * (config.qk_nope_head_dim + value)
    return weights + heads * value * hidden, scored + value


def _mlp_layers(config: Any) -> tuple[int, int]:
    """Layers with one MLP, and layers with experts."""
    if not experts_of(config):
        return config.num_hidden_layers, 0
    dense = min(getattr(config, "first_k_dense_replace", 0) or 0, config.num_hidden_layers)
    return dense, config.num_hidden_layers - dense


def _expert_weights(config: Any) -> int:
    """Weights of the router and of the experts that one token meets in a layer."""
    if not experts_of(config):
        return 0
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    met = config.num_experts_per_tok * width + (getattr(config, "n_shared_experts", 0) or 0) * width
    met += getattr(config, "shared_expert_intermediate_size", 0) or 0
    return config.hidden_size * (3 * met + experts_of(config))


# A part's sum, and its items.
Part = tuple[int, list[int]]


def karmarkar_karp(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Deal the indexes of ``sizes`` out to ``parts`` lists with nearly equal sums, each with its largest item first.

    Every item begins as a division of its own; the two divisions that are most uneven are merged, the heaviest part of
    one with the lightest of the other, until one is left (Karmarkar and Karp, The Differencing Method of Set
    Partitioning, UCB/CSD 82/113, 1982). Empty parts of a division are not listed, so that time and memory are
    O(n log n + parts). The same sizes give the same parts.
    """
    heap: list[tuple[int, int, list[Part]]] = [(-size, index, [(size, [index])]) for index, size in enumerate(sizes)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        merged = _merged(one, other, parts)
        spread = merged[-1][0] - (merged[0][0] if len(merged) == parts else 0)
        heapq.heappush(heap, (-spread, min(first, second), merged))
    found = [items for _, _, division in heap for _, items in division]
    found.extend([] for _ in range(parts - len(found)))
    return [sorted(items, key=lambda index: (-sizes[index], index)) for items in found]


def _merged(one: list[Part], other: list[Part], parts: int) -> list[Part]:
    """Merge two divisions, each with its lightest part first. Those of one that find no empty part in the other are its
    lightest, which go to the lightest of the other, crosswise."""
    few, many = sorted((one, other), key=len)
    met = max(0, len(few) + len(many) - parts)
    added = [_joined(*pair) for pair in zip(few[:met], reversed(many[:met]), strict=True)] + few[met:]
    del many[:met]
    for part in added:
        insort(many, part)
    return many


def _joined(one: Part, other: Part) -> Part:
    few, many = sorted((one[1], other[1]), key=len)
    many.extend(few)
    return one[0] + other[0], many


def imbalance(sums: Sequence[int]) -> float:
    """How far the largest of these sums is above their mean: 0 is perfect balance."""
    return max(sums) * len(sums) / sum(sums) - 1.0 if any(sums) else 0.0


# A group is divided only if that leaves the busiest rank less than this share of its work.
WORTH_DIVIDING = 0.95


class Sized(Protocol):
    """What the layout reads of a row; every TrajectoryHeader has it."""

    @property
    def tokens(self) -> int: ...

    @property
    def baseline(self) -> bool: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def prompt(self) -> Hashable: ...


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step. ``ranks[r]`` lists rank r's micro-batches (row indexes into the batch).

    All ranks have the same number of micro-batches, since every forward pass is a collective; short ranks get empty
    ones. ``rows`` are those of all ranks.
    """

    ranks: list[list[list[int]]]
    rows: list[int]


def mask_bound(config: RunConfig) -> int | None:
    """The staleness beyond which tokens are masked; None where the queue's own bound suffices."""
    return config.queue.max_staleness if config.queue.on_straggler == "mask" else None


def fresh_runs(header: TrajectoryHeader, step: int, max_staleness: int | None) -> list[VersionRun]:
    """Return the runs of sampled tokens that may train at ``step``; a bound of None keeps all."""
    if header.baseline:
        return []
    if max_staleness is None:
        return header.versions
    return [run for run in header.versions if step - run.version.step <= max_staleness]


def layout(
    headers: Sequence[Sized], *, step: int, minibatches: int, ranks: int, max_tokens: int, seed: int, cost: RowCost
) -> list[MiniBatch]:
    """Split a batch into mini-batches, ranks and token-budget micro-batches.

    Groups are permuted with (seed, step) and their rows cut into ``minibatches`` equal parts, so that rows of one
    prompt stay together but for those at a cut; greedy episodes, which do not train, are dealt out to them afterwards,
    so that no part has nothing else. Within a part ranks get nearly equal cost, and so do the micro-batches of a rank,
    each with at most ``max_tokens`` tokens (a single longer row stands alone). For a model that shares
    prefixes, a prompt counts once in each micro-batch. For one that pads, a micro-batch holds rows of similar length,
    and padding counts.
    """
    sizes = Sizes(headers, cost)
    groups = sizes.by_prompt([row for row, header in enumerate(headers) if not header.baseline])
    order = np.random.default_rng([seed & 0xFFFFFFFF, step]).permutation(len(groups))
    train = np.array([row for group in order for row in groups[group]], dtype=np.int64)
    parts = [part.tolist() for part in np.array_split(train, minibatches) if len(part)] or [[]]
    for number, row in enumerate(row for row, header in enumerate(headers) if header.baseline):
        parts[number % len(parts)].append(row)
    result = []
    for part in parts:
        shares = _over_ranks(part, sizes, ranks)
        if cost.padded:
            per_rank = [_similar(rows, headers, max_tokens) for rows in shares]
        else:
            best_fit = [_best_fit(rows, sizes, max_tokens) for rows in shares]
            deepest = max(len(micro) for micro in best_fit)
            per_rank = [_even(micro, deepest, sizes, max_tokens) for micro in best_fit]
        deepest = max(len(micro) for micro in per_rank)
        for micro in per_rank:
            micro.extend([] for _ in range(deepest - len(micro)))
        result.append(MiniBatch(ranks=per_rank, rows=sorted(part)))
    return result


@dataclass(frozen=True)
class Sizes:
    """How large rows are together, in one micro-batch."""

    headers: Sequence[Sized]
    cost: RowCost

    def tokens(self, rows: Sequence[int]) -> int:
        """The tokens that are computed."""
        return self._sum(rows, lambda tokens: tokens)

    def work(self, rows: Sequence[int]) -> int:
        """Their cost."""
        return self._sum(rows, self.cost.of)

    def _sum(self, rows: Sequence[int], of: Callable[[int], int]) -> int:
        if not self.cost.shares_prefixes:
            return sum(of(self.headers[row].tokens) for row in rows)
        prompts = {self.headers[row].prompt: of(self.headers[row].prompt_tokens) for row in rows}
        own = sum(of(self.headers[row].tokens) - of(self.headers[row].prompt_tokens) for row in rows)
        return own + sum(prompts.values())

    def by_prompt(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows with the same prompt together, in order of their first."""
        groups: dict[Hashable, list[int]] = {}
        for row in rows:
            header = self.headers[row]
            groups.setdefault(header.prompt if header.prompt_tokens else ("alone", row), []).append(row)
        return list(groups.values())

    def pieces(self, rows: Sequence[int], most: int) -> list[list[int]]:
        """Rows that share a prompt in pieces of at most ``most``; single ones if nothing is shared."""
        if not self.cost.shares_prefixes:
            return [[row] for row in rows]
        return [group[at : at + most] for group in self.by_prompt(rows) for at in range(0, len(group), most)]


def _balance(pieces: list[list[int]], sizes: Sizes, parts: int) -> list[list[list[int]]]:
    """Deal pieces out to parts of nearly equal cost, each with its most expensive piece first."""
    shares = karmarkar_karp([sizes.work(piece) for piece in pieces], parts)
    return [[pieces[number] for number in share] for share in shares]


def _over_ranks(rows: list[int], sizes: Sizes, ranks: int) -> list[list[int]]:
    """Give each rank its rows. Groups are halved, and halved again, only while that relieves the busiest rank: a prompt
    that two ranks have is computed by both."""
    if ranks == 1:
        return [rows]
    best, busiest = list[list[int]](), 0.0
    most = max((len(piece) for piece in sizes.pieces(rows, len(rows) or 1)), default=1)
    while most:
        shares = [_rows(share) for share in _balance(sizes.pieces(rows, most), sizes, ranks)]
        work = max(sizes.work(share) for share in shares)
        if not best or work < WORTH_DIVIDING * busiest:
            best, busiest = shares, work
        most //= 2
    return best


def _rows(pieces: list[list[int]]) -> list[int]:
    return [row for piece in pieces for row in piece]


def token_imbalance(plan: Sequence[MiniBatch], headers: Sequence[Sized], cost: RowCost) -> float:
    """How far the rank with the most tokens is above the mean, in the worst mini-batch; 0 for one rank."""
    return cost_imbalance(plan, headers, RowCost(shares_prefixes=cost.shares_prefixes))


def cost_imbalance(plan: Sequence[MiniBatch], headers: Sequence[Sized], cost: RowCost) -> float:
    """How far the rank with the highest cost is above the mean, in the worst mini-batch; 0 for one rank."""
    sizes = Sizes(headers, cost)
    return max(imbalance([sum(sizes.work(micro) for micro in micros) for micros in mini.ranks]) for mini in plan)


def forward_flops(plan: Sequence[MiniBatch], headers: Sequence[Sized], cost: RowCost) -> int:
    """Floating-point operations of one forward pass over the batch, on all ranks together."""
    sizes = Sizes(headers, cost)
    return sum(sizes.work(micro) for mini in plan for micros in mini.ranks for micro in micros)


def _best_fit(rows: list[int], sizes: Sizes, max_tokens: int) -> list[list[list[int]]]:
    """Few micro-batches within the budget: each group that fits into one, largest first, goes into the fullest that has
    room, and a larger one is divided."""
    micros, rooms = list[list[list[int]]](), list[tuple[int, int]]()
    pieces = [part for piece in sizes.pieces(rows, len(rows)) for part in _divided(piece, sizes, max_tokens)]
    for tokens, piece in sorted(((sizes.tokens(piece), piece) for piece in pieces), key=lambda sized: -sized[0]):
        place = bisect_left(rooms, (tokens, 0))
        if place == len(rooms):
            micros.append([piece])
            insort(rooms, (max_tokens - tokens, len(micros) - 1))
        else:
            room, number = rooms.pop(place)
            micros[number].append(piece)
            insort(rooms, (room - tokens, number))
    return micros


def _divided(group: list[int], sizes: Sizes, max_tokens: int) -> list[list[int]]:
    """Parts of a group within the budget; a single longer row stands alone."""
    parts, filled = list[list[int]](), 0
    for row in group:
        added = sizes.tokens([row]) - (sizes.headers[row].prompt_tokens if parts and sizes.cost.shares_prefixes else 0)
        if parts and filled + added <= max_tokens:
            parts[-1].append(row)
            filled += added
        else:
            parts.append([row])
            filled = sizes.tokens([row])
    return parts


def _even(micros: list[list[list[int]]], count: int, sizes: Sizes, max_tokens: int) -> list[list[int]]:
    """Spread the pieces of ``micros`` over ``count`` micro-batches of nearly equal cost, unless those overflow."""
    even = [_rows(pieces) for pieces in _balance([piece for micro in micros for piece in micro], sizes, count)]
    fits = all(len(micro) <= 1 or sizes.tokens(micro) <= max_tokens for micro in even)
    return even if fits else [_rows(micro) for micro in micros]


def _similar(rows: list[int], headers: Sequence[Sized], max_tokens: int) -> list[list[int]]:
    micro: list[list[int]] = []
    longest = 0
    # The first row of a micro-batch sets its width.
    for row in sorted(rows, key=lambda row: -headers[row].tokens):
        if micro and longest * (len(micro[-1]) + 1) <= max_tokens:
            micro[-1].append(row)
        else:
            micro.append([row])
            longest = headers[row].tokens
    return micro
