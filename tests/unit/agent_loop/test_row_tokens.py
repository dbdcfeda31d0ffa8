"""A row's record of experts: each token's first, as far as engines said any, whatever later answers repeat."""

import numpy as np

from rl_async.agent_loop.episode import RowTokens
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateResult, Routes


def answer(tokens: int, start: int, experts: list[int] | None) -> GenerateResult:
    """``experts``: one number for each token from ``start`` on."""
    routes = None if experts is None else Routes(start, np.array(experts, np.uint8)[:, None, None].repeat(2, 2))
    return GenerateResult(
        token_ids=[7] * tokens,
        logprobs=[-1.0] * tokens,
        versions=[VersionRun(Version(), 0, tokens)],
        finish_reason="stop",
        routes=routes,
    )


def record(row: RowTokens) -> list[int]:
    experts = row.arrays()["routed_experts"]
    assert experts.shape[1:] == (1, 2) and experts.dtype == np.uint8
    return list(experts[:, 0, 0])


def test_answers_that_begin_where_the_record_ends_are_appended() -> None:
    row = RowTokens([1, 2, 3])
    row.add_sampled(answer(2, 0, [10, 11, 12, 13]))
    assert row.routed == 4 and len(row) == 5
    row.add([4, 5])
    row.add_sampled(answer(1, 4, [14, 15, 16]))
    assert record(row) == [10, 11, 12, 13, 14, 15, 16] and len(row) == 8


def test_a_token_keeps_its_first_record() -> None:
    row = RowTokens([1, 2, 3])
    row.add_sampled(answer(2, 0, [10, 11, 12, 13]))
    row.add_sampled(answer(1, 0, [90, 91, 92, 93, 14]))
    assert record(row) == [10, 11, 12, 13, 14]


def test_what_an_engine_without_a_record_sampled_gets_it_from_the_next_answer() -> None:
    row = RowTokens([1, 2])
    row.add_sampled(answer(2, 0, None))
    assert row.routed == 0 and row.arrays()["routed_experts"] is None
    row.add_sampled(answer(1, 0, [10, 11, 12, 13]))
    assert record(row) == [10, 11, 12, 13]


def test_a_record_with_a_gap_before_it_is_left_out() -> None:
    row = RowTokens([1, 2])
    row.add_sampled(answer(2, 1, [11, 12]))
    assert row.arrays()["routed_experts"] is None
