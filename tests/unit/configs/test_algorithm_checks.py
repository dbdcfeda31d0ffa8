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
        ["algorithm.advantage=gdpo", "algorithm.kl.place=reward"],
    ),
    (
        ["algorithm.kl.coef=0.1", "algorithm.kl.adaptive.horizon=76"],
        ["algorithm.kl.adaptive.horizon=76", "384", "77"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.shaping.reward_clip=1"],
        ["algorithm.advantage=gdpo", "algorithm.shaping.reward_clip"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.shaping.reward_scale=batch_std"],
        ["algorithm.advantage=gdpo", "algorithm.shaping.reward_scale"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.shaping.overlong.max_tokens=9"],
        ["algorithm.advantage=gdpo", "algorithm.shaping.overlong"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.advantage_options.gdpo_weights={typo: 2}"],
        ["algorithm.advantage_options.gdpo_weights", "typo"],
    ),
    (
        ["algorithm.advantage=optimal_token_baseline", "algorithm.shaping.overlong_filter=true"],
        ["algorithm.advantage=optimal_token_baseline", "algorithm.shaping.overlong_filter"],
    ),
    (["algorithm.kl.adaptive={}"], ["algorithm.kl.adaptive", "algorithm.kl.coef=0"]),
    (["algorithm.kl.reference_path=x"], ["algorithm.kl.reference_path", "algorithm.kl.coef"]),
    (["algorithm.correction_options.max_age=1"], ["algorithm.correction_options.max_age=1", "queue.max_staleness=1"]),
    (
        ["algorithm.loss=clip_cov", "algorithm.loss_options.clip_cov_low=5"],
        ["clip_cov_low=5", "clip_cov_high=5"],
    ),
    (
        ["algorithm.loss=sapo", "algorithm.loss_options.clip_dual=3"],
        ["algorithm.loss_options.clip_dual", "algorithm.loss=sapo", "sapo_tau_positive"],
    ),
    (["algorithm.advantage_options.lam=0.9"], ["algorithm.advantage_options.lam", "algorithm.advantage=grpo"]),
    (["algorithm.correction_options.age_weights=[0, 1]"], ["algorithm.correction_options.age_weights"]),
    (
        ["algorithm.correction=decoupled_token_icepop", "algorithm.correction_options.band=2_3"],
        ["algorithm.correction_options.band=2_3"],
    ),
    (
        ["algorithm.correction_options.reject={seq_mean_k1: 1.5_3}"],
        ["algorithm.correction_options.reject", "seq_mean_k1: 1.5_3"],
    ),
    (
        ["algorithm.shaping.dynamic_sampling=true", "algorithm.advantage=reinforce_plus_plus"],
        ["dynamic_sampling", "algorithm.advantage=reinforce_plus_plus"],
    ),
    (
        ["algorithm.loss=vespo", "algorithm.correction=decoupled_seq_is"],
        ["algorithm.loss=vespo", "decoupled_seq_is", "decoupled_token_is"],
    ),
    (
        ["algorithm.advantage=gae", "critic={}", "algorithm.advantage_options={lam: 0.9, lam_alpha: 0.05}"],
        ["algorithm.advantage_options.lam_alpha", "lam=0.9"],
    ),
    (["algorithm.advantage=dpo", "algorithm.kl.estimator=full"], ["algorithm.advantage=dpo", "estimator=full"]),
    (["algorithm.norm_length=64"], ["algorithm.norm_length", "seq-mean-token-sum-norm"]),
    (["algorithm.kl.unbiased=true"], ["algorithm.kl.unbiased", "algorithm.kl.coef=0"]),
    (
        ["algorithm.kl.coef=0.1", "algorithm.kl.unbiased=true", "algorithm.kl.estimator=k2"],
        ["algorithm.kl.unbiased", "k2"],
    ),
    (["algorithm.loss=clip_kov"], ["clip_kov", "clip_cov"]),
]
ACCEPTED = [
    ["algorithm.advantage=remax", "rollout.group_size=1", "algorithm.shaping.dynamic_sampling=true"],
    ["algorithm.advantage=mine.py:advantage", "critic={}"],
    ["algorithm.correction_options.reject={token_k1: 2}"],
    ["algorithm.correction_options.max_age=0"],
    ["algorithm.loss=decoupled_ppo", "algorithm.correction=disabled"],
    ["algorithm.loss=m2po"],
    ["algorithm.advantage=dpo", "algorithm.loss=reinforce", "algorithm.kl.reference_path=x"],
    ["algorithm.loss=vespo", "algorithm.correction=bypass_ppo_clip"],
    ["algorithm.loss=gspo", "algorithm.aggregation=seq-mean-token-mean"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=full"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3", "algorithm.kl.place=reward"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.adaptive.horizon=77"],
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
