"""Make whole batches, and rows that begin alike, for tests of the results computed from them."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_async.messages import Trajectory
from rl_async.trainer.backend import Outputs
from rl_async.trainer.batch_layout import MiniBatch
from rl_async.trainer.batches import Batch, WholeBatch, assemble
from rl_async.trainer.packing import Tensors, empty_tensors, prefix_tree
from rl_async.trainer.ranks import DataParallel


def whole_batch(
    rows: Sequence[Trajectory], step: int = 0, max_staleness: int | None = None, *, with_states: bool = False
) -> WholeBatch:
    """Put rows together as a rank that holds all of them."""
    numbers = list(range(len(rows)))
    plan = [MiniBatch(ranks=[[numbers]], rows=numbers)]
    batch = Batch(step, [row.header() for row in rows], plan, {row.key: row for row in rows})
    trains = torch.ones(len(rows), dtype=torch.bool)
    return assemble(DataParallel(0, 1, is_recorder=True), batch, max_staleness, trains, with_states=with_states)


OPENING = 8  # tokens with which all rows begin
PROMPTS = {8: (3, 5, 5, 1, 9), 12: (2, 4), 0: (7,)}  # its own tokens -> those of its answers
HISTORY = 9  # tokens after a prompt that two of its rows have in common


def shared_rows(vocab: int, device: str = "cpu") -> Tensors:
    """Groups with an opening, a prompt, and of two rows an answer in common; one row twice, and some that others begin
    with."""
    draw = np.random.default_rng(1)

    def some(count: int) -> list[int]:
        return draw.integers(3, vocab, count).tolist()

    opening, rows = some(OPENING), list[list[int]]()
    for prompt, answers in PROMPTS.items():
        asked = opening + some(prompt)
        rows += [asked + some(answer) for answer in answers]
        history = asked + some(HISTORY)
        rows += [history + some(4), history + some(6)]
    rows += [rows[0], list(opening), rows[-1][:-2]]
    lengths = [len(row) for row in rows]
    tokens = np.zeros((len(rows), max(lengths)), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    temperatures = [0.7] * len(rows)
    temperatures[1] = 1.3
    tensors = empty_tensors(device)
    tensors.tokens = torch.from_numpy(tokens).to(device)
    tensors.lengths = torch.tensor(lengths)
    tensors.temperature = torch.tensor(temperatures, device=device)[:, None, None]
    tensors.tree = prefix_tree(tokens, lengths, temperatures)
    return tensors


def loss_of(outputs: Outputs, lengths: Tensor) -> Tensor:
    """Return the mean over sequences, each with a weight of its own, of the bent means of all outputs."""
    total = torch.zeros(())
    for bent in bent_means(outputs, lengths):
        weights = torch.linspace(-1.0, 2.0, len(bent), device=bent.device)
        total = total.to(bent.device) + (weights * bent).mean()
    return total


def bent_means(outputs: Outputs, lengths: Tensor) -> Iterator[Tensor]:
    """Yield the tanh of each sequence's mean over its tokens, [B], of every output that there is."""
    parts = [outputs.logprobs, outputs.entropy, outputs.sum_squares, outputs.values]
    if outputs.distribution is not None:
        parts.append(outputs.distribution.square().mean(-1))
    for part in parts:
        if part is not None:
            real = (torch.arange(part.shape[1]) + 1 < lengths[:, None]).to(part.device)
            yield (torch.where(real, part, 0.0).sum(1) / lengths.to(part.device)).tanh()


# A stand-in, in plain torch, for kernels that attend among the sequences of a packed row.


def by_borders(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: Tensor,
    same: Tensor,
    longest: int,
    longest_too: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """What PyTorch documents of ``varlen_attn``, which has no kernel for CPUs: a token sees so many before and behind
    it in its sequence, -1: all."""
    sequence = torch.bucketize(torch.arange(len(q)), borders, right=True)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    back, ahead = window_size
    sees = (sequence[:, None] == sequence) & (distance >= -ahead) & ((distance <= back) | (back == -1))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), v)
