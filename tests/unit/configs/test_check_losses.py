"""Losses, corrections and KL terms that do not go together are refused, naming the keys; the ways out are accepted."""

import pytest

from rl_async.configs.load import load_config
from rl_async.errors import ConfigError

REFUSED = [
    (["algorithm.loss=decoupled_ppo"], ["algorithm.loss=decoupled_ppo", "algorithm.correction=decoupled_token_is"]),
    (["algorithm.loss=m2po", "algorithm.correction=bypass_ppo_clip"], ["algorithm.loss=m2po", "bypass_ppo_clip"]),
    (
        ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=full", "algorithm.kl.place=reward"],
        ["algorithm.kl.estimator=full", "algorithm.kl.place=loss"],
    ),
    (["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3+", "algorithm.kl.place=reward"], ["estimator=k3+", "reward"]),
    (["algorithm.loss=decoupled_ppo", "algorithm.correction=bypass_ppo_clip"], ["algorithm.loss=decoupled_ppo", "mu"]),
    (
        ["algorithm.advantage=gdpo", "algorithm.kl.coef=0.1", "algorithm.kl.place=reward"],
        ["algorithm.advantage=gdpo", "algorithm.kl.place=loss"],
    ),
    (
        ["algorithm.kl.coef=0.1", "algorithm.kl.controller=adaptive", "algorithm.kl.horizon=76"],
        ["algorithm.kl.horizon=76", "384 trajectories", "more than 77"],
    ),
    (["algorithm.loss=clip_kov"], ["clip_kov", "clip_cov"]),
]
ACCEPTED = [
    ["algorithm.loss=decoupled_ppo", "algorithm.correction=disabled"],
    ["algorithm.loss=m2po"],
    ["algorithm.loss=gspo", "algorithm.aggregation=seq-mean-token-mean"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=full"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3", "algorithm.kl.place=reward"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.controller=adaptive", "algorithm.kl.horizon=77"],
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED)
def test_losses_that_cannot_work_name_their_keys(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("calculator", overrides)
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_the_ways_out_are_accepted(overrides: list[str]) -> None:
    load_config("calculator", overrides)
