"""Batches: their sources, the rows that a rank takes, and the whole batch that all ranks hold."""

import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async import messages
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError, RlAsyncError, RowsChanged, RowsLost
from rl_async.messages import Done, NotReady, Reserved, Trajectory, TrajectoryHeader, Turn, Version, VersionRun
from rl_async.trainer import attention, batches
from rl_async.trainer.attention import packed_attention
from rl_async.trainer.batch_layout import (
    MiniBatch,
    RowCost,
    cost_imbalance,
    imbalance,
    karmarkar_karp,
    layout,
    row_cost_of,
    token_imbalance,
)
from rl_async.trainer.batches import Batch, QueueSource, agreed, assemble, take_batch
from rl_async.trainer.packing import Tensors, collate, empty_tensors, on_tokens, pack, pack_tree, prefix_tree, row_calls
from rl_async.trainer.ranks import DataParallel, StopRequest, pure_data_parallel
from rl_async.trainer.records import Recorder
from rl_async.transfer_queue.client import announced_rows, parcel
from tests.conftest import make_rows
from tests.support.batches import by_borders, whole_batch
from tests.support.families import COMMON, SPECIAL
from tests.support.rounding import assert_near, rounding


class SourceQueue:
    """Answers what it is given, one after another."""

    def __init__(self, *answers: Reserved | NotReady) -> None:
        self.answers = list(answers)

    def reserve(self, step: int, wait_s: float) -> Reserved | NotReady:
        assert step == BATCH.step and 0 < wait_s <= 10, "it waits at the queue, and not past a request to stop"
        return self.answers.pop(0)

    def fetch_announced(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        return []

    def commit(self, step: int) -> Done:
        return Done()

    def retire(self, step: int) -> Done:
        return Done()

    def snapshot(self) -> bytes:
        return b""

    def tighten(self, max_staleness: int) -> Done:
        return Done()


AWAY = NotReady(why="none", unattended_s=280.0)
MISSING = NotReady(why="one is missing")
BATCH = Reserved(step=3, headers=[])


def source(
    *answers: Reserved | NotReady, timeout_s: float = 1e-9, clock: Callable[[], float] = time.monotonic
) -> QueueSource:
    return QueueSource(SourceQueue(*answers), timeout_s, lambda step, rows: None, clock)


def test_no_deadline_passes_while_no_program_plays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rl_async.trainer"):
        assert source(*[AWAY] * 5, BATCH, timeout_s=3600.0).reserve(3, lambda: False) is BATCH
    (line,) = [record.getMessage() for record in caplog.records]
    assert "280 s" in line and "step 3" in line


def test_the_deadline_counts_from_when_a_program_was_there_last() -> None:
    clock = map(float, range(0, 10000, 100)).__next__
    assert source(*[AWAY] * 20, BATCH, timeout_s=300.0, clock=clock).reserve(3, lambda: False) is BATCH
    with pytest.raises(RlAsyncError, match=r"trainer\.batch_timeout_s"):
        source(*[AWAY] * 3, *[MISSING] * 9, timeout_s=300.0, clock=clock).reserve(3, lambda: False)


def test_a_pause_of_the_trainer_counts_an_eighth_of_the_deadline() -> None:
    times = [float(second) for second in range(0, 200, 2)]
    paused = iter(times[:50] + [time + 10_000.0 for time in times])
    assert source(*[MISSING] * 130, BATCH, timeout_s=300.0, clock=paused.__next__).reserve(3, lambda: False) is BATCH


def test_a_request_to_stop_ends_the_wait() -> None:
    assert source(AWAY, AWAY).reserve(3, lambda: True) is None


CONFIG = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="none"))


class ChangedRowsQueue(SourceQueue):
    """Reserves one batch, and gives the rows of each answer in turn; the last again and again."""

    def __init__(self, *answers: list[Trajectory] | RowsLost) -> None:
        super().__init__()
        self._answers = list(answers)

    def reserve(self, step: int, wait_s: float) -> Reserved | NotReady:
        return Reserved(
            step=step, headers=[parcel([row], None).headers[0] for row in make_rows(step, groups=1, samples=2)]
        )

    def fetch_announced(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, RowsLost):
            raise answer
        announced_rows(headers, list(map(messages.encode, answer)))
        return answer


def take(queue: ChangedRowsQueue, folder: Path) -> list[Trajectory]:
    source = QueueSource(queue, 1.0, Recorder(folder, 2, 0, is_recorder=False).refused)
    batch = take_batch(5, source, StopRequest(), CONFIG, pure_data_parallel(), RowCost(0, 0))
    assert batch is not None
    return list(batch.rows.values())


def test_rows_that_were_lost_are_asked_for_again(one_rank: None, tmp_path: Path) -> None:
    rows = make_rows(5, groups=1, samples=2)
    assert take(ChangedRowsQueue(RowsLost("gone"), rows), tmp_path) == rows


def test_a_batch_has_its_rows_and_the_images_that_these_show(one_rank: None) -> None:
    rows, shown = make_rows(5, groups=1, samples=2), list[list[Trajectory]]()
    reserved = Reserved(step=5, headers=[row.header() for row in rows])

    class Source(QueueSource):
        def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None:
            return reserved

        def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
            return rows

        def fetch_media(self, rows: Sequence[Trajectory]) -> dict[str, bytes]:
            shown.append(list(rows))
            return {"sha256": b"picture"}

    source = Source(SourceQueue(), 1.0, lambda step, rows: None)
    batch = take_batch(5, source, StopRequest(), CONFIG, pure_data_parallel(), RowCost(0, 0))
    assert batch is not None and shown == [rows]
    assert (batch.step, batch.headers, batch.media) == (5, reserved.headers, {"sha256": b"picture"})


def test_changed_rows_are_recorded_by_any_rank_and_never_trained(one_rank: None, tmp_path: Path) -> None:
    rows = make_rows(5, groups=1, samples=2)
    changed = msgspec.structs.replace(rows[1], token_ids=rows[1].token_ids + 1)
    with pytest.raises(RowsChanged):
        take(ChangedRowsQueue([rows[0], changed]), tmp_path)
    (line,) = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    key = dict(zip(("group", "sample", "segment"), rows[1].key, strict=True))
    assert line == {"lineage": 2, "step": 5, "rank": 0, "tokens_hash": changed.tokens_hash()} | key


def test_a_rank_with_intact_rows_ends_with_the_one_whose_rows_changed(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "agreed", lambda *_, **__: (False, False))
    with pytest.raises(RowsChanged) as caught:
        take(ChangedRowsQueue(make_rows(5, groups=1, samples=2)), tmp_path)
    assert caught.value.tokens_hash == {}, "another rank's log names them"


def test_ranks_go_on_only_if_no_row_of_any_changed(one_rank: None) -> None:
    headers = [row.header() for row in make_rows(0)]
    assert agreed(headers, intact=True, fetched=True) == (True, True)
    assert agreed(headers, intact=True, fetched=False) == (True, False)
    assert agreed(headers, intact=False, fetched=False)[0] is False


class Ranks(DataParallel):
    """One of two ranks, which adds what the other has sent before."""

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        super().__init__(rank, 2, is_recorder=True)
        self.__dict__["sent"] = sent

    def all_reduce(self, tensor: Tensor) -> None:
        own = tensor.clone()
        for other in self.__dict__["sent"]:
            tensor += other
        self.__dict__["sent"].append(own)


def test_tokens_shift_by_one_and_stale_ones_are_masked() -> None:
    row = make_rows(0)[0]
    sampled = int(row.loss_mask.sum())
    row.versions = [VersionRun(Version(0, 1), 0, 3), VersionRun(Version(0, 5), 3, sampled)]
    free, bound = whole_batch([row], step=5), whole_batch([row], step=5, max_staleness=2)
    assert np.array_equal(free.mask.numpy(), row.loss_mask[1:])
    assert np.array_equal(free.behaviour.numpy(), row.logprobs[1:])
    assert free.age[free.mask].tolist() == [4] * 3 + [0] * (sampled - 3) and free.age.dtype == torch.int64
    assert int(free.mask.sum()) - int(bound.mask.sum()) == 3
    assert not bound.mask[3:6].any()


def test_a_first_token_that_was_sampled_counts_in_its_version() -> None:
    row = make_rows(0)[0]
    row.loss_mask = np.ones(len(row.token_ids), dtype=bool)
    row.versions = [VersionRun(Version(0, 1), 0, 2), VersionRun(Version(0, 5), 2, len(row.token_ids))]
    assert whole_batch([row], step=5).age.tolist() == [4] + [0] * (len(row.token_ids) - 2)


def test_turns_and_their_rewards_stand_on_sampled_tokens() -> None:
    row = make_rows(0)[0]
    n = len(row.token_ids)
    row.loss_mask[:] = [False] * 2 + [True] * 2 + [False] + [True] * (n - 5)
    row.versions = [VersionRun(Version(0, 0), 0, n - 3)]
    row.turns = [
        Turn(role="assistant", text="", start=2, end=5, reward=0.5),
        Turn(role="tool", text="", start=5, end=5),
        Turn(role="assistant", text="", start=5, end=7, reward=0.25),
    ]
    got = whole_batch([row])
    assert got.turns.tolist() == [-1, 0, 0, -1, 1, 1] + [-1] * (n - 7) and got.turns.dtype == torch.int64
    assert got.turn_rewards.tolist() == [0, 0, 0.5, 0, 0, 0.25] + [0] * (n - 7)


@pytest.mark.parametrize("share", [[0, 2], []])
def test_ranks_that_hold_different_rows_get_the_same_batch(share: list[int]) -> None:
    rows = make_rows(3, groups=2)
    rows[4].loss_mask[:] = False
    rows[4].versions = []
    rows[1].logprobs[5:] = -0.0  # every bit survives
    rows[0].constrained, rows[3].constrained = [(1, 3), (4, 5)], [(0, int(rows[3].loss_mask.sum()))]
    rest = [i for i in range(len(rows)) if i not in share]
    plan = [MiniBatch(ranks=[[share], [rest]], rows=list(range(len(rows))))]
    trains = torch.arange(len(rows)) != 6
    headers, sent = [row.header() for row in rows], list[Tensor]()
    for rank, own in ((0, share), (1, rest)):
        batch = Batch(3, headers, plan, {rows[i].key: rows[i] for i in own})
        got = assemble(Ranks(rank, sent), batch, None, trains)
    expected = whole_batch(rows, step=3)
    for name in ("behaviour", "age", "turns", "turn_rewards", "constrained"):
        assert torch.equal(getattr(got, name), getattr(expected, name))
    constrained, mask = got.rows.pad_all(got.constrained), expected.rows.pad_all(expected.mask)
    assert constrained[0].nonzero().flatten().tolist() == [4, 5, 7]  # token 4, the first sampled, is predicted at 3
    assert torch.equal(constrained[3], mask[3]) and not constrained[[1, 2, 4]].any()
    rows[0].constrained = rows[3].constrained = []
    assert torch.equal(got.turns, whole_batch(rows, step=3).turns), "a mark is no part of the turn's number"
    assert torch.equal(got.behaviour.view(torch.int32), expected.behaviour.view(torch.int32))
    assert torch.equal(got.mask, expected.mask & on_tokens(trains, got.rows))


# The layout of a batch over ranks and micro-batches, the cost of a row, and the partition into equal shares.


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


# Micro-batches as tensors: padded, packed, and as trees of shared prefixes.


def test_collate_pads_rows_and_masks_what_was_not_sampled() -> None:
    rows = make_rows(0)[:3]
    batch = collate(rows, device="cpu")
    assert batch.lengths.tolist() == [len(row.token_ids) for row in rows]
    for i, row in enumerate(rows):
        assert np.array_equal(batch.tokens[i, : len(row.token_ids)].numpy(), row.token_ids)
        assert not batch.tokens[i, len(row.token_ids) :].any()
        assert np.array_equal(batch.mask[i, : len(row.token_ids) - 1].numpy(), row.loss_mask[1:])


def test_a_given_mask_stands() -> None:
    rows = make_rows(0)[:2]
    mask = torch.zeros((2, max(len(row.token_ids) for row in rows) - 1), dtype=torch.bool)
    assert torch.equal(collate(rows, device="cpu", mask=mask).mask, mask)


def with_experts(first: int, count: int, shape: tuple[int, int] = (2, 3)) -> Trajectory:
    row = make_rows(0)[first]
    experts = (np.arange(count * shape[0] * shape[1]) % 251).astype(np.uint8).reshape(count, *shape)
    return msgspec.structs.replace(row, routed_experts=experts)


def test_experts_are_padded_with_what_no_router_chooses() -> None:
    rows = [with_experts(0, 5), make_rows(0)[1], with_experts(2, len(make_rows(0)[2].token_ids) - 1)]
    batch = collate(rows, device="cpu", replay_routers=True)
    assert batch.experts is not None and batch.experts.shape == (*batch.tokens.shape, 2, 3)
    assert np.array_equal(batch.experts[0, :5].numpy(), rows[0].routed_experts)
    assert (batch.experts[0, 5:] == -1).all() and (batch.experts[1] == -1).all()
    assert np.array_equal(batch.experts[2, : batch.lengths[2] - 1].numpy(), rows[2].routed_experts)
    assert collate(rows, device="cpu").experts is None
    assert collate(rows[1:2], device="cpu", replay_routers=True).experts is None
    with pytest.raises(DataError):
        collate([rows[0], with_experts(1, 4, (2, 4))], device="cpu", replay_routers=True)


def padded(lengths: list[int]) -> Tensors:
    """Row b holds 100 b + 1, 100 b + 2, ...; its temperature is b + 1."""
    width = max(2, *lengths)
    batch = empty_tensors("cpu")
    batch.tokens = torch.zeros((len(lengths), width), dtype=torch.int64)
    for row, length in enumerate(lengths):
        batch.tokens[row, :length] = 100 * row + 1 + torch.arange(length)
    batch.lengths = torch.tensor(lengths)
    batch.temperature = torch.arange(1.0, len(lengths) + 1)[:, None, None]
    batch.experts = batch.tokens.to(torch.int16)[..., None, None].expand(-1, -1, 2, 3)
    return batch


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_what_is_computed_per_token_comes_back_where_the_token_is(lengths: list[int]) -> None:
    batch = padded(lengths)
    packed = pack(batch)
    assert packed.tokens.shape == packed.positions.shape == (1, sum(lengths))
    assert sum(length * sequences for length, sequences in packed.groups) == sum(lengths)
    assert [length for length, _ in packed.groups] == sorted(set(lengths), reverse=True)
    assert packed.positions[0].tolist() == [
        t for length, sequences in packed.groups for _ in range(sequences) for t in range(length)
    ]
    there = torch.arange(batch.tokens.shape[1] - 1) + 1 < batch.lengths[:, None]
    for flat, expected in (
        (packed.tokens[0], batch.tokens[:, :-1]),
        (packed.targets, batch.tokens[:, 1:]),
        (packed.temperature, batch.temperature[:, 0].expand(there.shape)),
        (packed.experts, batch.experts[:, :-1]),
        (packed.tokens[0, :, None] * torch.tensor([1, 2]), batch.tokens[:, :-1, None] * torch.tensor([1, 2])),
    ):
        back = packed.unpack(flat)
        assert back.shape == expected.shape
        assert back[there].equal(expected[there])
        assert not back[~there].any()


def checked(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, same: Tensor, longest: int, too: int, **named: Any
) -> Tensor:
    """The stand-in, given what a kernel relies on."""
    assert same is borders and borders.dtype == torch.int32
    assert longest == too >= borders.diff().max()
    return by_borders(q, k, v, borders, same, longest, too, **named)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_one_call_for_the_row_computes_what_one_for_each_sequence_does(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = pack(padded([2, 5, 5])).backbone_inputs()
    row = inputs["packed_row"]
    assert row.borders.tolist() == row.host_borders.tolist() == [0, 5, 10, 12] and row.longest >= 5
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    given = {"packed_row": row, "attention_mask": None, "scaling": 0.3, "sliding_window": window}
    expected, _ = packed_attention(module, q, k, v, **given)
    monkeypatch.setattr(attention, "_kernel_takes", lambda query, value: True)
    monkeypatch.setattr(attention, "_kernel", checked)
    given["packed_row"] = replace(row, has_kernel=True)
    found, _ = packed_attention(module, q, k, v, **given)
    # Outputs are averages of values; the scores, sums of 8 products, change their weights.
    size = v.abs().max().item()
    scores = 0.3 * 8 * q.abs().max().item() * k.abs().max().item()
    assert_near(found, expected, 2 * rounding(size * max(1.0, 2 * scores), terms=8))


def test_pytorchs_kernel_takes_fewer_key_heads_than_query_heads() -> None:
    """Without elements, as a CPU has no kernel: what this version of PyTorch checks of its arguments."""
    q, k, v = (
        torch.empty(12, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (6, 2, 2)
    )
    borders = torch.empty(4, dtype=torch.int32, device="meta")
    out = attention._kernel(q, k, v, borders, borders, 5, 5, scale=0.3, window_size=(2, 0))
    assert out.shape == q.shape
    assert [part.shape for part in torch.autograd.grad(out, (q, k, v), out)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    "asked",
    [
        {"packed_row": None},
        {"attention_mask": torch.ones(1, 1, 4, 4)},
        {"position_bias": torch.zeros(1)},
        {"causal": False},
    ],
)
def test_what_packed_attention_does_not_compute_is_refused(asked: dict) -> None:  # type: ignore[type-arg]
    asked = {"packed_row": row_calls(((4, 1),), torch.device("cpu")), "attention_mask": None} | asked
    module = torch.nn.Module()
    module.is_causal = asked.pop("causal", True)  # type: ignore[assignment]
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="families"):
        packed_attention(module, x, x, x, **asked)


ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=12), st.sampled_from([1.0, 0.5])), min_size=1, max_size=7
)


def tree_batch(rows: list[list[int]]) -> np.ndarray:
    tokens = np.zeros((len(rows), max(2, *map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


@given(ROWS, st.integers(1, 4))
def test_a_row_is_a_path_and_its_tokens_see_that_path(drawn: list[tuple[list[int], float]], least: int) -> None:
    rows, temperatures = [row for row, _ in drawn], [temperature for _, temperature in drawn]
    tokens = tree_batch(rows)
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
    batch.tokens = torch.from_numpy(tree_batch([row for row, _ in drawn]))
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
    tree = prefix_tree(tree_batch(rows), [4, 4, 2, 5], [1.0] * 4, 1)
    assert tree is not None
    assert len(tree.places) == 5
    assert [len(path) for path in tree.paths] == [4, 4, 2, 5]


def test_nodes_are_as_few_as_pay() -> None:
    rows = [[1] * 9 + [2] * 3, [1] * 9 + [3] * 3, [1] * 4 + [4] * 8]
    tree = prefix_tree(tree_batch(rows), [12] * 3, [1.0] * 3, 5)
    assert tree is not None
    assert [tuple(node) for node in tree.nodes] == [(0, 9, 15), (9, 12, 12), (12, 15, 15), (15, 27, 27)]


def test_collate_makes_a_tree_only_when_it_is_asked_to() -> None:
    rows = make_rows(0)[:2]
    rows[1] = rows[0]
    assert collate(rows, device="cpu").tree is None
    shared = collate(rows, device="cpu", share_prefixes=True)
    assert shared.tree is not None
    assert shared.computed == len(rows[0].token_ids) == int(shared.lengths.sum()) / 2
