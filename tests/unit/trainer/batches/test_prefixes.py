"""Trees of prefixes: every row is a path of its own tokens, and a token sees its path alone."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.trainer.packing import collate, empty_tensors, pack_tree, prefix_tree
from tests.conftest import make_rows

ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=12), st.sampled_from([1.0, 0.5])), min_size=1, max_size=7
)


def padded(rows: list[list[int]]) -> np.ndarray:
    tokens = np.zeros((len(rows), max(2, *map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


@given(ROWS, st.integers(1, 4))
def test_a_row_is_a_path_and_its_tokens_see_that_path(drawn: list[tuple[list[int], float]], least: int) -> None:
    rows, temperatures = [row for row, _ in drawn], [temperature for _, temperature in drawn]
    tokens = padded(rows)
    tree = prefix_tree(tokens, [len(row) for row in rows], temperatures, least)
    if tree is None:
        for (row, a), (other, b) in ((x, y) for i, x in enumerate(drawn) for y in drawn[:i]):
            assert a != b or row[:least] != other[:least] or min(len(row), len(other)) < least
        return
    assert len(tree.places) < sum(map(len, rows))
    assert [tree.nodes[0].start, *(node.stop for node in tree.nodes)] == [
        *(node.start for node in tree.nodes),
        len(tree.places),
    ]
    seen = [set[int]() for _ in tree.places]
    for start, stop, end in tree.nodes:
        for token in range(start, end):
            seen[token] |= set(range(start, min(token + 1, stop)))
    owners: dict[int, set[float]] = {}
    for number, (row, path) in enumerate(zip(rows, tree.paths, strict=True)):
        assert tokens.flatten()[tree.places[path]].tolist() == row
        assert tree.positions[path].tolist() == list(range(len(row)))
        assert tree.before[path].tolist() == [-1, *path[:-1]]
        for at, token in enumerate(path.tolist()):
            assert seen[token] == set(path[: at + 1].tolist())
            owners.setdefault(token, set()).add(temperatures[number])
    assert all(len(those) == 1 for those in owners.values()), "one distribution predicts a token"


@given(ROWS)
def test_what_is_computed_for_a_prediction_comes_back_in_every_row_that_makes_it(
    drawn: list[tuple[list[int], float]],
) -> None:
    batch = empty_tensors("cpu")
    batch.tokens = torch.from_numpy(padded([row for row, _ in drawn]))
    batch.lengths = torch.tensor([len(row) for row, _ in drawn])
    batch.temperature = torch.tensor([temperature for _, temperature in drawn])[:, None, None]
    tree = prefix_tree(batch.tokens.numpy(), batch.lengths.tolist(), batch.temperature.flatten().tolist(), 1)
    if tree is None:
        return
    packed = pack_tree(batch, tree)
    there = torch.arange(batch.tokens.shape[1] - 1) + 1 < batch.lengths[:, None]
    for flat, expected in (
        (packed.targets, batch.tokens[:, 1:]),
        (packed.temperature, batch.temperature[:, 0].expand(there.shape)),
        (packed.predicting(packed.tokens[0]), batch.tokens[:, :-1]),
        (packed.predicting(packed.positions[0]), torch.arange(there.shape[1]).expand(there.shape)),
    ):
        back = packed.unpack(flat)
        assert back[there].equal(expected[there])
        assert not back[~there].any()


def test_rows_that_end_where_others_go_on_need_no_tokens_of_their_own() -> None:
    rows = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6], [5, 6, 7, 8, 9]]
    tree = prefix_tree(padded(rows), [4, 4, 2, 5], [1.0] * 4, 1)
    assert tree is not None
    assert len(tree.places) == 5
    assert [len(path) for path in tree.paths] == [4, 4, 2, 5]


def test_nodes_are_as_few_as_pay() -> None:
    rows = [[1] * 9 + [2] * 3, [1] * 9 + [3] * 3, [1] * 4 + [4] * 8]
    tree = prefix_tree(padded(rows), [12] * 3, [1.0] * 3, 5)
    assert tree is not None
    assert [tuple(node) for node in tree.nodes] == [(0, 9, 15), (9, 12, 12), (12, 15, 15), (15, 27, 27)]


def test_collate_makes_a_tree_only_when_it_is_asked_to() -> None:
    rows = make_rows(0)[:2]
    rows[1] = rows[0]
    assert collate(rows, device="cpu").tree is None
    shared = collate(rows, device="cpu", share_prefixes=True)
    assert shared.tree is not None
    assert shared.computed == len(rows[0].token_ids) == int(shared.lengths.sum()) / 2
