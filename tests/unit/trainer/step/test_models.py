"""What the models of a step have in common."""

from pathlib import Path

import pytest

from rl_async.configs.schema.algorithm import AlgorithmConfig, KlConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.trainer.models import build_models

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(("estimator", "shares"), [("k3", True), ("full", False)])
def test_rows_share_nothing_where_whole_distributions_are_kept_of_each(
    model_folder: Path, estimator: str, shares: bool
) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(model_folder), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(kl=KlConfig(coef=0.1, estimator=estimator)),
    )
    assert build_models(config, "cpu").row_cost.shares_prefixes is shares
