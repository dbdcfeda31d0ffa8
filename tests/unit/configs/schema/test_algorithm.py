"""What can be asked of a correction: wrong values and combinations are refused, naming the key."""

import math

import pytest

from rl_async.configs.checks import problems
from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import AlgorithmConfig, band, limits
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError

OPTIONS = "algorithm.correction_options"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.correction=decoupled_token"], ["algorithm.correction", "decoupled_token_i"]),
        ([f"{OPTIONS}.band=2_1"], [f"{OPTIONS}.band", "'2_1'"]),
        ([f"{OPTIONS}.band=0.5_2.0", f"{OPTIONS}.cap=2"], [OPTIONS, "cap and band"]),
        (["algorithm.correction=disabled", f"{OPTIONS}.cap=2"], [f"{OPTIONS}.cap", f"{OPTIONS}.weight"]),
        (["algorithm.correction=decoupled_geo_rs", f"{OPTIONS}.normalise=true"], [f"{OPTIONS}.normalise"]),
        ([f"{OPTIONS}.reject={{seq_min_k1: 0.9_1.1}}"], ["reject.seq_min_k1", "seq_mean_k1"]),
        ([f"{OPTIONS}.reject={{token_k1: 0.5}}"], ["reject.token_k1", "c > 1"]),
        ([f"{OPTIONS}.reject={{token_k3: 0.1_0.2}}"], ["reject.token_k3", "> 0"]),
        ([f"{OPTIONS}.age_weights=[1, -1]"], ["age_weights"]),
        (
            ["algorithm.correction=bypass_pg_is", f"{OPTIONS}.normalise=true"],
            [f"{OPTIONS}.normalise", "algorithm.correction=bypass_pg_is", "whole batch"],
        ),
        (
            ["algorithm.correction=bypass_ppo_clip", f"{OPTIONS}.weight=token"],
            [f"{OPTIONS}.weight", "algorithm.loss=ppo", "twice"],
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("calculator", overrides)
    for part in named:
        assert part in str(caught.value)


def test_a_loss_of_the_users_own_is_not_silently_replaced() -> None:
    assert load_config("calculator", ["algorithm.correction=bypass_pg_is", "algorithm.loss=reinforce"])
    assert load_config("calculator", ["algorithm.correction=bypass_pg_is"])
    config = RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        algorithm=AlgorithmConfig(correction="bypass_pg_is", loss="gspo"),
    )
    assert any("algorithm.loss=gspo asks for another" in problem for problem in problems(config))


def test_yaml_does_not_take_bands_for_numbers() -> None:
    config = load_config("calculator", [f"{OPTIONS}.reject={{token_k1: 0_5, seq_sum_k1: 0.5_3}}"])
    assert config.algorithm.correction_options.reject == {"token_k1": "0_5", "seq_sum_k1": "0.5_3"}
    assert load_config("calculator", [f"{OPTIONS}.band=0.5_5"]).algorithm.correction_options.band == "0.5_5"


def test_bands_and_limits() -> None:
    assert band("0.6_1.4") == (0.6, 1.4) and band("0_5") == (0.0, 5.0)
    assert limits("seq_mean_k1", 2) == (0.5, 2.0) and limits("seq_mean_k3", "0.01") == (-math.inf, 0.01)
    for text in ("1", "0.5-2", "-1_2", "a_b", "nan_1", "1_nan", "0_inf"):
        with pytest.raises(ConfigError, match="low_high"):
            band(text)
