"""The layout of a batch over ranks and micro-batches, the cost of a row, and the partition into equal shares."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.messages import TrajectoryHeader, Version, VersionRun
from rl_async.trainer.batch_layout import (
    RowCost,
    cost_imbalance,
    imbalance,
    karmarkar_karp,
    layout,
    row_cost_of,
    token_imbalance,
)
from tests.support.families import COMMON, SPECIAL


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
        tokens_hash="",
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
    assert cost_imbalance(uneven, alone, cost) < 0.02 < 0.3 < token_imbalance(uneven, alone, cost)
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


def group(number: int, prompt: int, answers: list[int]) -> list[TrajectoryHeader]:
    headers = [header(4 * number, prompt + answer) for answer in answers]
    return [
        msgspec.structs.replace(h, group_id=number, sample=i, prompt_tokens=prompt, prompt_crc32=number)
        for i, h in enumerate(headers)
    ]


SHARING = RowCost(10, 1, shares_prefixes=True)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(20, 150),
)
def test_a_prompt_counts_once_in_each_micro_batch(groups, minibatches, ranks, budget) -> None:
    headers = [h for number, (prompt, answers) in enumerate(groups) for h in group(number, prompt, answers)]
    plan = layout(headers, step=0, minibatches=minibatches, ranks=ranks, max_tokens=budget, seed=1, cost=SHARING)
    rows = sorted(i for mini in plan for micros in mini.ranks for micro in micros for i in micro)
    assert rows == list(range(len(headers)))
    for micro in (micro for mini in plan for micros in mini.ranks for micro in micros):
        prompts = {headers[i].group_id: headers[i].prompt_tokens for i in micro}
        computed = sum(prompts.values()) + sum(headers[i].tokens - headers[i].prompt_tokens for i in micro)
        assert len(micro) <= 1 or computed <= budget


def test_groups_stay_together_where_ranks_are_balanced_all_the_same() -> None:
    headers = [h for number in range(8) for h in group(number, 100, [20] * 4)]
    (mini,) = layout(headers, step=0, minibatches=1, ranks=2, max_tokens=10_000, seed=0, cost=SHARING)
    whose = [{headers[i].group_id for micro in micros for i in micro} for micros in mini.ranks]
    assert not whose[0] & whose[1]
    assert len(whose[0]) == len(whose[1]) == 4
    for minibatches in (2, 4):
        minis = layout(headers, step=0, minibatches=minibatches, ranks=1, max_tokens=10_000, seed=0, cost=RowCost())
        seen = [{headers[i].group_id for i in mini.rows} for mini in minis]
        assert sum(map(len, seen)) == len(set.union(*seen)) == 8, "mini-batches are of whole groups, shared or not"


def test_a_group_is_divided_when_that_makes_the_slowest_rank_faster() -> None:
    one = group(0, 10, [50] * 8)
    (mini,) = layout(one, step=0, minibatches=1, ranks=2, max_tokens=10_000, seed=0, cost=SHARING)
    assert [sum(map(len, micros)) for micros in mini.ranks] == [4, 4]
    assert cost_imbalance([mini], one, SHARING) == 0
    long = group(0, 1000, [1] * 2)
    (mini,) = layout(long, step=0, minibatches=1, ranks=2, max_tokens=10_000, seed=0, cost=SHARING)
    assert sorted(sum(map(len, micros)) for micros in mini.ranks) == [0, 2], "the prompt is nearly all of it"
    (mini,) = layout(one, step=0, minibatches=1, ranks=1, max_tokens=250, seed=0, cost=SHARING)
    assert sorted(map(len, mini.ranks[0])) == [4, 4], "divided by the budget alone, 10 + 4 * 50"


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama", "mistral", "phi3", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_linear_work_is_two_operations_per_weight_that_a_token_meets(kind: str) -> None:
    config = AutoConfig.for_model(kind, **(COMMON | SPECIAL.get(kind, {})))
    model = AutoModelForCausalLM.from_config(config)
    met = 0.0
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or "embed" in name or "shared_expert_gate" in name:
            continue
        routed = ".experts." in name  # 2 of 4 experts
        met += weight.numel() * (0.5 if routed else 1.0)
    assert row_cost_of(config).linear == 2 * met


def test_quadratic_work_counts_scores_and_values_of_half_the_pairs() -> None:
    llama = AutoConfig.for_model("llama", **COMMON)
    assert row_cost_of(llama).quadratic == 4 * 4 * (16 + 16)  # layers, heads, elements of a key and of a value
    deepseek = AutoConfig.for_model("deepseek_v3", **(COMMON | SPECIAL["deepseek_v3"]))
    assert row_cost_of(deepseek).quadratic == 4 * 4 * (24 + 12)


def test_the_work_of_a_row() -> None:
    assert RowCost(linear=10, quadratic=2).of(3) == 48
    assert RowCost().of(3) == 3


def spread(sizes: list[int], parts: list[list[int]]) -> int:
    sums = [sum(sizes[i] for i in part) for part in parts]
    return max(sums) - min(sums)


def longest_first(sizes: list[int], parts: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(shares, key=lambda share: sum(sizes[j] for j in share)).append(i)
    return shares


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 9))
def test_every_row_is_dealt_out_once_and_no_part_is_off_by_more_than_a_row(sizes: list[int], parts: int) -> None:
    shares = karmarkar_karp(sizes, parts)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    assert spread(sizes, shares) <= max(sizes, default=0)
    assert all(sizes[a] >= sizes[b] for share in shares for a, b in itertools.pairwise(share))
    assert shares == karmarkar_karp(list(sizes), parts)


def test_the_example_of_the_literature() -> None:
    sizes = [8, 7, 6, 5, 4]
    assert spread(sizes, karmarkar_karp(sizes, 2)) == 2
    assert spread(sizes, longest_first(sizes, 2)) == 4


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_it_beats_giving_the_longest_row_to_the_lightest_rank(parts: int) -> None:
    random = np.random.default_rng(parts)
    batches = [random.lognormal(6, 1, 64).astype(int).tolist() for _ in range(50)]
    ours = [spread(sizes, karmarkar_karp(sizes, parts)) for sizes in batches]
    greedy = [spread(sizes, longest_first(sizes, parts)) for sizes in batches]
    assert np.median(ours) < 0.7 * np.median(greedy)


def test_imbalance_is_the_excess_of_the_largest_over_the_mean() -> None:
    assert imbalance([3, 1]) == pytest.approx(0.5)
    assert imbalance([2, 2, 2]) == imbalance([0, 0]) == 0.0
