"""When weights are published, and the metrics of a batch."""

import msgspec
import numpy as np
import pytest

from rl_async.configs.load import load_config
from rl_async.messages import ToolCall, Turn, episode_rewards
from rl_async.trainer.train import batch_metrics, conversation_metrics, conversation_sums, publishes_after
from tests.conftest import make_rows


@pytest.mark.parametrize(("overrides", "steps"), [([], [2, 4, 5]), (["rollout.replay=runs/before"], [1, 2, 3, 4, 5])])
def test_a_replay_announces_every_step_because_the_queue_waits_for_it(overrides: list[str], steps: list[int]) -> None:
    config = load_config(
        "calculator", ["trainer.steps=5", "weight_sync.every=2", "queue.max_staleness=1", *overrides],
        mode="disaggregated",
    )  # fmt: skip
    assert [step for step in range(1, 6) if publishes_after(config, step)] == steps


def metrics(groups: list[list[float | None]]) -> dict[str, float]:
    """Rewards by group; None: the scorer failed, and the recorded reward is garbage."""
    rows = make_rows(0, groups=len(groups), samples=len(groups[0]))
    for row, reward in zip(rows, [r for group in groups for r in group], strict=True):
        row.scored, row.reward = reward is not None, -99.0 if reward is None else reward
    return batch_metrics([row.header() for row in rows], 0, None)


def test_rows_without_a_reward_are_counted_and_left_out() -> None:
    got = metrics([[1.0, None], [0.0, 0.5]])
    assert got["reward/mean"] == pytest.approx(0.5)
    assert got["reward/std"] == pytest.approx((((0.5**2) * 2) / 3) ** 0.5)
    assert got["reward/unscored_fraction"] == 0.25
    assert got["reward/groups_without_signal"] == 0.5


@pytest.mark.parametrize(
    ("groups", "share"),
    [([[1.0, 1.0], [0.0, 0.0]], 1.0), ([[1.0, 0.0], [None, None]], 0.5), ([[0.0, 1.0], [1.0, 0.0]], 0.0)],
)
def test_a_group_without_scored_rows_has_no_signal(groups: list[list[float | None]], share: float) -> None:
    assert metrics(groups)["reward/groups_without_signal"] == share


def test_an_episode_of_several_rows_counts_once() -> None:
    rows = make_rows(0, groups=1, samples=2)
    rows[0].reward, rows[1].reward = 1.0, 0.0
    more = [msgspec.structs.replace(rows[0], segment=segment) for segment in (1, 2)]
    got = batch_metrics([row.header() for row in [rows[0], *more, rows[1]]], 0, None)
    assert (got["reward/mean"], got["batch/trajectories"], got["batch/episodes"]) == (0.5, 4.0, 2.0)
    assert got["reward/unscored_fraction"] == 0.0


def test_turn_rewards_belong_to_an_episodes_reward() -> None:
    rows = make_rows(0, groups=1, samples=2)
    rows[0].reward = rows[1].reward = 0.0
    rows[0].turns = [Turn(role="assistant", text="", reward=0.25), Turn(role="user", text="")]
    more = msgspec.structs.replace(rows[0], segment=1, turns=[Turn(role="assistant", text="", reward=0.5)])
    headers = [row.header() for row in (rows[0], more, rows[1])]
    assert episode_rewards(headers) == {(0, 0): 0.75, (0, 1): 0.0}
    got = batch_metrics(headers, 0, None)
    assert (got["reward/mean"], got["reward/groups_without_signal"]) == (0.375, 0.0)


def test_malformed_calls_are_counted_by_kind() -> None:
    rows = make_rows(0, groups=1, samples=2)
    calls = [ToolCall(name="", arguments="", problem=kind) for kind in ("bad_json", "unclosed", "bad_json", None)]
    calls[-1].cut = 10_000
    size = len(rows[0].token_ids)
    rows[0].turns = [Turn(role="assistant", text="", end=size, tool_calls=calls)]
    masked = np.zeros(size, bool)
    later = msgspec.structs.replace(rows[0], segment=1, loss_mask=masked)  # the same turn, as context of a later row
    rows = [*rows, later]
    got = conversation_metrics(conversation_sums([row.header() for row in rows], rows))
    kinds = {name: value for name, value in got.items() if "malformed" in name}
    assert kinds == {"rollout/malformed_calls/bad_json": 2.0, "rollout/malformed_calls/unclosed": 1.0}
    assert got["rollout/tool_calls_mean"] == 4 / 2, "per episode, not per row"
    assert got["rollout/cut_results_mean"] == 1 / 2


def test_turns_and_tokens_are_means_over_episodes() -> None:
    rows = make_rows(0, groups=1, samples=2)
    later = msgspec.structs.replace(rows[0], segment=1)
    for row in (rows[0], later, rows[1]):
        row.turns, row.error = [Turn(role="assistant", text="", start=4, end=len(row.token_ids))], "no"
    rows[1].error = ""
    rows = [rows[0], later, rows[1]]
    got = conversation_metrics(conversation_sums([row.header() for row in rows], rows))
    assert got["rollout/turns_mean"] == 3 / 2 and got["rollout/error_fraction"] == 1 / 2
    sampled = [int(row.loss_mask.sum()) for row in rows]
    tokens = batch_metrics([row.header() for row in rows], 0, None)
    assert tokens["rollout/response_tokens_mean"] == sum(sampled) / 2
