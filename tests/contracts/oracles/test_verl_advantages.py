"""Every advantage estimator that verl has too.

Ours compute in float64 what verl computes in the type of the rewards. Conversions, each at its place below:
- epsilon beside a standard deviation: verl is given ours, 1e-4 (its own is 1e-6).
- `gpg`: alpha counts episodes of groups whose rewards differ here, and non-zero rewards in verl.
- `remax`: without turn rewards, which verl's advantage takes from their turn on and ours as a whole.
- `gdpo`: verl computes in float32 whatever it is given.
- Token baselines: verl adds 1e-8 to the sum that divides; it is given 1e-30.
- `optimal_token_baseline`: without holes, where verl takes a count of tokens for a column.
- A row alone in its group gets 0 here and its reward in verl; no group of these cases is that small.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AdvantageOptions
from rl_async.trainer.algorithms.advantages import ADVANTAGES, EPSILON, AdvantageInputs, Groups, gae
from rl_async.trainer.update import on_last_token
from tests.contracts.oracles.oracle import Case, Oracle, Tensors, assert_same, both_types

pytestmark = pytest.mark.slow
WIDTH = 12
GROUP_ARGUMENTS = ["index", "epsilon"]
GAMMAS = (1.0, 0.99, 0.5)


@dataclass(frozen=True)
class Pair:
    """An estimator of verl's, what of a case it is given, and the factor that makes of its answer ours."""

    ours: str
    arguments: list[str]
    options: dict[str, Any] = field(default_factory=dict)  # of the request to verl
    turn_rewards: bool = True
    holes: bool = True
    in_float32: bool = False
    factor: Callable[[AdvantageInputs], float] = lambda x: 1.0


def _alpha(x: AdvantageInputs) -> float:
    groups = Groups.of(x.groups, x.weights)
    return int(x.rewards.count_nonzero()) / max(int(groups.differs(x.rewards).sum()), 1)


_NORM = [*GROUP_ARGUMENTS, "norm_adv_by_std_in_grpo"]
_BASELINE = [*GROUP_ARGUMENTS, "old_log_probs", "sum_pi_squared", "rollout_is_weights"]
_PARTS = ["index", "epsilon", "config", "non_tensor_batch", "batch"]
PAIRS = {
    "grpo": Pair("grpo", _NORM, {"norm": True}),
    "grpo without deviation": Pair("dr_grpo", _NORM, {"norm": False}),
    "grpo_vectorized": Pair("grpo", _NORM, {"norm": True}),
    "grpo_passk": Pair("grpo_passk", [*GROUP_ARGUMENTS, "config"]),
    "gdpo": Pair("gdpo", _PARTS, {"algorithm": {"gdpo_reward_keys": ["a", "b"]}}, in_float32=True),
    "rloo": Pair("rloo", ["index"]),
    "rloo_vectorized": Pair("rloo", ["index"]),
    "opo": Pair("opo", ["index"]),
    "gpg": Pair("gpg", ["index"], factor=_alpha),
    "remax": Pair("remax", ["reward_baselines"], turn_rewards=False),
    "reinforce_plus_plus": Pair("reinforce_plus_plus", ["config"]),
    "reinforce_plus_plus_baseline": Pair("reinforce_plus_plus_baseline", ["index"]),
    "gae": Pair("gae", ["values", "gamma", "lam"]),
    "optimal_token_baseline": Pair("optimal_token_baseline", _BASELINE, {"epsilon": 1e-30}, holes=False),
    "tir_optimal_token_baseline": Pair("tir_optimal_token_baseline", _BASELINE, {"epsilon": 1e-30}),
}


def draw_batch(generator: torch.Generator, number: int) -> Tensors:
    """Groups of two to four rows of unequal length, rewards of which many are equal, and rewards of turns."""
    sizes = (torch.randint(2, 5, (3,), generator=generator)).tolist()
    groups = torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)])
    rows = len(groups)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, WIDTH + 1, (rows, 1), generator=generator)
    within = torch.arange(WIDTH) < lengths
    holes = within & (uniform(rows, WIDTH) < 0.7)
    holes[:, 0] = True
    distributions = uniform(rows, WIDTH, 5).pow(3)
    distributions /= distributions.sum(2, keepdim=True)
    choices = (0.0, 1.0) if number % 2 else (-1.0, 0.0, 0.5, 2.0)
    return {
        "outcomes": torch.tensor(choices).double()[torch.randint(len(choices), (rows,), generator=generator)],
        "turn_rewards": (0.25 * (uniform(rows, WIDTH) < 0.2).double()),
        "within": within,
        "mask": holes,
        "groups": groups,
        "values": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        "baselines": uniform(3)[groups],
        "logprobs": distributions[:, :, 0].log(),
        "sum_squares": (distributions**2).sum(2),
        "importance": 2 * uniform(rows, WIDTH),
        "part.a": torch.randint(2, (rows,), generator=generator).double(),
        "part.b": torch.randint(9, (rows,), generator=generator).double() / 8,  # equal in either type, or far apart
    }


def make_cases(name: str) -> list[Case]:
    """The cases as verl's estimator ``name`` takes them."""
    pair, cases = PAIRS[name], both_types(draw_batch)
    for number, case in enumerate(cases):
        if not pair.holes:
            case.tensors["mask"] = case["within"]
        turn_rewards = torch.where(case["mask"], case["turn_rewards"], 0.0)
        rewards = on_last_token(case["outcomes"], case["mask"])
        case.tensors["rewards"] = rewards + turn_rewards if pair.turn_rewards else rewards
        algorithm = {"gamma": GAMMAS[number % 3]} | pair.options.get("algorithm", {})
        if name == "gdpo":
            algorithm["gdpo_reward_weights"] = [1.0, 0.5 + number % 4]
        case.options = {"epsilon": EPSILON, "arguments": pair.arguments} | pair.options
        case.options |= {"name": name.partition(" ")[0], "algorithm": algorithm, "lam": (1.0, 0.9)[number % 2]}
    return cases


def our_inputs(case: Case) -> AdvantageInputs:
    """The same batch as our estimators take it."""
    x = {name: t.double() if t.is_floating_point() else t for name, t in case.tensors.items()}
    weights = case.options["algorithm"].get("gdpo_reward_weights", [1.0, 1.0])
    rows = len(x["groups"])
    return AdvantageInputs(
        rewards=x["rewards"].sum(1),
        token_rewards=x["rewards"],
        mask=x["mask"],
        groups=x["groups"],
        scored=torch.ones(rows, dtype=torch.bool),
        row_weights=torch.ones(rows, dtype=torch.float64),
        lengths=x["mask"].sum(1).double(),
        turns=torch.where(x["mask"], 0, -1),
        options=AdvantageOptions(
            gamma=case.options["algorithm"]["gamma"],
            lam=case.options["lam"],
            gdpo_weights=dict(zip("ab", weights, strict=True)),
        ),
        parts={"a": x["part.a"], "b": x["part.b"]},
        baselines=x["baselines"],
        values=x["values"],
        logprobs=x["logprobs"],
        sum_squares=x["sum_squares"],
        importance=x["importance"],
    )


@pytest.mark.parametrize("name", PAIRS)
def test_an_advantage_is_verls(verl: Oracle, name: str) -> None:
    pair, cases = PAIRS[name], make_cases(name)
    for case, theirs in zip(cases, verl.ask("advantage", cases), strict=True):
        x = our_inputs(case)
        case.dtype = torch.float32 if pair.in_float32 else case.dtype
        expected = torch.where(x.mask, theirs["advantages"].double(), 0.0)  # verl's gae gives numbers elsewhere, too
        assert_same(ADVANTAGES[pair.ours](x), pair.factor(x) * expected, case)


def test_the_critics_targets_are_verls(verl: Oracle) -> None:
    cases = make_cases("gae")
    for case, theirs in zip(cases, verl.ask("advantage", cases), strict=True):
        x = our_inputs(case)
        assert x.values is not None
        _, returns = gae(x.token_rewards, x.values, x.mask, x.options.gamma, x.options.lam)
        assert_same(returns, torch.where(x.mask, theirs["returns"].double(), 0.0), case)


def test_every_estimator_of_either_side_is_compared(verl: Oracle) -> None:
    assert ADVANTAGES.keys() == {pair.ours for pair in PAIRS.values()}
    [answer] = verl.ask("names", [Case({"any": torch.zeros(1)}, torch.float64, {"registry": "advantages"})])
    assert set(bytes(answer["names"].tolist()).decode().split("\n")) == {name.partition(" ")[0] for name in PAIRS}
