"""Episodes of several roles in the trainer: what is compared with what, and how much a row counts."""

import statistics
from collections import defaultdict
from collections.abc import Callable

import msgspec
import pytest

from rl_async.configs.schema.algorithm import ADVANTAGES as TRAITS
from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig, RewardTerm
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RewardsMissing
from rl_async.messages import Trajectory, Turn, episode_rewards, has_signal, role_rewards
from rl_async.trainer.algorithms.advantages import ADVANTAGES, EPSILON, AdvantageInputs
from rl_async.trainer.batches import Batch
from rl_async.trainer.train import batch_metrics, conversation_metrics, conversation_sums
from rl_async.trainer.update import Precomputed, advantage_inputs, require_rewards
from tests.conftest import make_rows
from tests.support.batches import whole_batch

Player = tuple[int, int, str]  # group, sample, role

# group, sample, role, its outcome, and the turn reward in each of its rows
PLAYED: tuple[tuple[int, int, str, float, tuple[float, ...]], ...] = (
    (0, 0, "buyer", 1.0, (0.0,)),
    (0, 0, "seller", -1.0, (0.0,)),
    (0, 1, "buyer", 0.25, (0.5,)),
    (0, 1, "seller", 3.0, (0.0, 0.75)),  # two rows
    (0, 2, "buyer", 0.5, (0.0,)),  # the seller never had a turn
    (1, 0, "buyer", 2.0, (0.0,)),
    (1, 0, "seller", 7.0, (0.0,)),
    (1, 1, "buyer", 2.0, (0.0, 0.0)),  # two rows
    (1, 1, "seller", 5.0, (0.25,)),
)


def played(roles: bool = True) -> list[Trajectory]:
    """The rows of PLAYED. Without roles each role's part of an episode is an episode of a group of its own."""
    source = make_rows(0, groups=2, samples=6)
    rows, segments = list[Trajectory](), defaultdict[tuple[int, int], int](int)
    for group, sample, role, outcome, turn_rewards in PLAYED:
        for number, reward in enumerate(turn_rewards):
            row = source[len(rows)]
            place = {"group_id": group, "sample": sample, "episode_id": f"{group}.{sample}", "role": role}
            if not roles:
                alone = 10 * group + (role == "seller")
                place = {"group_id": alone, "sample": sample, "episode_id": f"{alone}.{sample}", "role": ""}
            segment = segments[group, sample] if roles else number
            segments[group, sample] += 1
            turns = [Turn(role="assistant", text="", start=4, end=len(row.token_ids), reward=reward)]
            parts = {"exact": outcome}
            rows.append(
                msgspec.structs.replace(
                    row, **place, segment=segment, reward=outcome, turns=turns, reward_parts=parts, baseline=False
                )
            )
    return rows


def config(advantage: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage=advantage),
        reward=RewardConfig(functions=(RewardTerm(name="exact"),)),
    )


def inputs(rows: list[Trajectory], advantage: str = "grpo") -> AdvantageInputs:
    whole = whole_batch(rows, with_states="states" in TRAITS[advantage].needs)
    before = Precomputed(
        whole.behaviour,
        2 * whole.behaviour,
        process=3 * whole.behaviour,
        values=whole.behaviour + 0.5,
        sum_squares=whole.behaviour.exp(),
    )
    return advantage_inputs(whole, before, None, config(advantage)).padded()


def totals() -> dict[Player, float]:
    return {(g, s, role): outcome + sum(turns) for g, s, role, outcome, turns in PLAYED}


def of_rows(per_player: dict[Player, float]) -> list[float]:
    return [per_player[g, s, role] for g, s, role, _, turns in PLAYED for _ in turns]


def compared(key: Player) -> list[float]:
    """What the same role earned in the episodes of its group."""
    return [reward for (g, _, role), reward in totals().items() if (g, role) == (key[0], key[2])]


def grpo(key: Player) -> float:
    return (totals()[key] - statistics.fmean(compared(key))) / (statistics.stdev(compared(key)) + EPSILON)


def rloo(key: Player) -> float:
    others = compared(key)
    others.remove(totals()[key])
    return totals()[key] - statistics.fmean(others)


def dr_grpo(key: Player) -> float:
    return totals()[key] - statistics.fmean(compared(key))


@pytest.mark.parametrize("formula", [grpo, rloo, dr_grpo])
def test_a_role_is_compared_with_itself_in_the_other_episodes_of_its_group(
    formula: Callable[[Player], float],
) -> None:
    x = inputs(played())
    got = ADVANTAGES[formula.__name__](x)
    expected = of_rows({key: formula(key) for key in totals()})
    assert x.rewards.tolist() == pytest.approx(of_rows(totals()), abs=1e-12)
    for row, advantage in enumerate(expected):
        assert got[row][x.mask[row]].tolist() == pytest.approx([advantage] * int(x.mask[row].sum()), abs=1e-9)
    assert len(set(expected)) > 4, "else nothing was compared"


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if "greedy" not in traits.needs])
def test_every_estimator_sees_a_role_as_an_episode_in_a_group_of_its_own(name: str) -> None:
    together, apart = (ADVANTAGES[name](inputs(played(roles=roles), name)) for roles in (True, False))
    assert together.abs().sum() > 0
    assert together.tolist() == apart.tolist()


def test_a_role_is_compared_with_itself_in_the_greedy_episode() -> None:
    rows = played()
    for row in rows:
        row.baseline = row.sample == 0
    x = inputs(rows, "remax")
    got = ADVANTAGES["remax"](x)
    expected = of_rows({key: reward - totals()[key[0], 0, key[2]] for key, reward in totals().items()})
    for row, advantage in zip(range(len(rows)), expected, strict=True):
        assert got[row][x.mask[row]].tolist() == pytest.approx([advantage] * int(x.mask[row].sum()))
    assert x.mask.any(1).tolist() == [row.sample != 0 for row in rows]


def test_in_the_loss_an_episode_counts_once_and_in_its_group_each_of_its_roles() -> None:
    whole = whole_batch(played())
    assert whole.row_weights.tolist() == pytest.approx(
        [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 1, *[1 / 2] * 2, *[1 / 3] * 3]
    )
    assert whole.player_weights.tolist() == [1, 1, 1, 1 / 2, 1 / 2, 1, 1, 1, 1 / 2, 1 / 2, 1]


def test_rewards_of_roles_are_told_apart() -> None:
    headers = [row.header() for row in played()]
    assert role_rewards(headers) == totals()
    assert episode_rewards(headers) == {(0, 0): 0.0, (0, 1): 2.25, (0, 2): 0.5, (1, 0): 4.5, (1, 1): 3.625}
    metrics = batch_metrics(headers, 0, None)
    assert metrics["reward/mean"] == pytest.approx((0.0 + 2.25 + 0.5 + 4.5 + 3.625) / 5)
    assert metrics["reward/mean/buyer"] == pytest.approx((1.0 + 0.75 + 0.5 + 2.0 + 2.0) / 5)
    assert metrics["reward/mean/seller"] == pytest.approx((-1.0 + 3.75 + 7.0 + 5.25) / 4)
    assert metrics["batch/episodes"] == 5


def test_a_group_whose_roles_always_earn_the_same_has_no_signal() -> None:
    rows = [row for row in played() if row.group_id == 1]
    assert has_signal([row.header() for row in rows]), "the seller's rewards differ"
    for row in rows:
        row.reward, row.turns = {"buyer": 1.0, "seller": -1.0}[row.role], []
    assert not has_signal([row.header() for row in rows]), "roles are not compared with one another"
    assert batch_metrics([row.header() for row in rows], 0, None)["reward/groups_without_signal"] == 1.0


def with_unscored_seller() -> list[Trajectory]:
    rows = played()
    for row in rows:
        if (row.group_id, row.sample, row.role) == (0, 1, "seller"):
            row.scored, row.error, row.reward = False, "reward judge: gone", 0.0
    return rows


def test_an_episode_of_which_one_role_was_not_scored_counts_as_not_scored() -> None:
    rows = with_unscored_seller()
    headers = [row.header() for row in rows]
    metrics = batch_metrics(headers, 0, None)
    assert (0, 1) not in episode_rewards(headers)
    assert metrics["reward/mean"] == pytest.approx((0.0 + 0.5 + 4.5 + 3.625) / 4)
    assert metrics["reward/unscored_fraction"] == pytest.approx(1 / 5)
    assert metrics["reward/mean/buyer"] == pytest.approx((1.0 + 0.75 + 0.5 + 2.0 + 2.0) / 5), "it was scored"
    # The rows of an episode may be on any ranks; one failure is one episode, on however many of them.
    ranks = [conversation_sums(headers, rows[rank::2]) for rank in range(2)]
    sums = [sum(both) for both in zip(*ranks, strict=True)]
    assert conversation_metrics(sums)["rollout/error_fraction"] == pytest.approx(1 / 5)


def test_a_role_that_was_scored_is_compared_with_itself_though_another_was_not() -> None:
    before, after = inputs(played()), inputs(with_unscored_seller())
    buyers = [row.role == "buyer" for row in played()]
    assert ADVANTAGES["grpo"](after)[buyers].tolist() == ADVANTAGES["grpo"](before)[buyers].tolist()
    assert not ADVANTAGES["grpo"](after)[[not x for x in after.scored.tolist()]].any()


def test_a_batch_without_an_episode_scored_in_full_is_refused() -> None:
    rows = [row for row in with_unscored_seller() if (row.group_id, row.sample) == (0, 1)]
    with pytest.raises(RewardsMissing, match="judge: gone"):
        require_rewards(Batch(0, [row.header() for row in rows], [], {row.key: row for row in rows}))
