"""The layout of a batch over mini-batches, ranks and micro-batches."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rl_async.messages import TrajectoryHeader, Version, VersionRun
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.layout import cost_imbalance, layout, token_imbalance


def header(i: int, tokens: int) -> TrajectoryHeader:
    return TrajectoryHeader(
        group_id=i // 4,
        sample=i % 4,
        attempt=0,
        partition="train",
        episode_id=str(i),
        segment=0,
        tokens=tokens,
        sampled=tokens // 2,
        reward=0.0,
        finish_reason="stop",
        versions=[VersionRun(Version(0, 3), 0, tokens // 2)],
        tokens_sha256="",
    )


@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(20, 200),
    st.integers(0, 5),
    st.sampled_from([RowCost(), RowCost(50, 1), RowCost(padded=True)]),
)
def test_every_row_is_trained_once_within_the_budget(lengths, minibatches, ranks, budget, step, cost) -> None:
    headers = [header(i, n) for i, n in enumerate(lengths)]
    plan = layout(headers, step=step, minibatches=minibatches, ranks=ranks, max_tokens=budget, seed=1, cost=cost)
    rows = sorted(i for mini in plan for micros in mini.ranks for micro in micros for i in micro)
    assert rows == list(range(len(lengths)))
    for mini in plan:
        assert len({len(micros) for micros in mini.ranks}) == 1
        assert mini.rows == sorted(i for micros in mini.ranks for micro in micros for i in micro)
        for micros in mini.ranks:
            for micro in micros:
                sizes = [lengths[i] for i in micro]
                assert len(micro) <= 1 or (max(sizes) * len(micro) if cost.padded else sum(sizes)) <= budget


def test_ranks_and_micro_batches_get_equal_work_and_not_equal_tokens() -> None:
    lengths = [100] * 2 + [10] * 200
    headers, cost = [header(i, n) for i, n in enumerate(lengths)], RowCost(linear=10, quadratic=1)
    plan = layout(headers, step=0, minibatches=1, ranks=2, max_tokens=800, seed=0, cost=cost)
    assert cost_imbalance(plan, headers, cost) < 0.01
    alone = [header(0, 100), *(header(i, 10) for i in range(1, 61))]  # 11,000 and 60 times 200
    uneven = layout(alone, step=0, minibatches=1, ranks=2, max_tokens=10_000, seed=0, cost=cost)
    assert cost_imbalance(uneven, alone, cost) < 0.02 < 0.3 < token_imbalance(uneven, alone)
    for micros in plan[0].ranks:
        costs = [sum(cost.of(lengths[i]) for i in micro) for micro in micros]
        assert len(costs) > 1
        assert max(costs) < 1.1 * min(costs)


def test_the_layout_depends_on_seed_and_step_only() -> None:
    headers = [header(i, 10 + i) for i in range(16)]
    same = [layout(headers, step=2, minibatches=2, ranks=2, max_tokens=99, seed=5, cost=RowCost()) for _ in range(2)]
    other = layout(headers, step=3, minibatches=2, ranks=2, max_tokens=99, seed=5, cost=RowCost())
    assert same[0] == same[1]
    assert same[0] != other


def test_every_mini_batch_has_rows_that_train() -> None:
    made = [header(i, 10) for i in range(16)]
    made[1::2] = [msgspec.structs.replace(h, baseline=True) for h in made[1::2]]
    for step in range(50):
        minis = layout(made, step=step, minibatches=4, ranks=2, max_tokens=64, seed=0, cost=RowCost())
        assert [sum(not made[row].baseline for row in mini.rows) for mini in minis] == [2] * 4
        assert [len(mini.rows) for mini in minis] == [4] * 4
