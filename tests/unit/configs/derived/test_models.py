"""The compute type that a role finds in its run's config."""

import pytest

from rl_async.configs.derived import compute_type
from rl_async.configs.schema.data import ModelConfig
from rl_async.errors import ConfigError


def test_a_role_refuses_a_type_that_is_not_settled() -> None:
    assert compute_type(ModelConfig(path="m", dtype="bfloat16")) == "bfloat16"
    with pytest.raises(ConfigError, match=r"model\.dtype=auto"):
        compute_type(ModelConfig(path="m"))
