"""``config explain`` knows every key: meaning, type, default."""

import pytest
import yaml

from rl_async.configs.explain import all_keys, describe, explain, field_names, key_text, struct_at
from rl_async.configs.load import dump, leaves, load_config
from rl_async.configs.schema.algorithm import PRESETS, Correction
from rl_async.errors import ConfigError

MOST_KEYS, MOST_SHOWN = 160, 180
RELIED_ON = """
    model.path data.path data.train_batch_groups rollout.engine rollout.group_size rollout.engines
    queue.max_staleness queue.journal trainer.backend trainer.learning_rate trainer.steps trainer.tensor_parallel
    algorithm.advantage algorithm.loss algorithm.correction weight_sync.transport tracking.backends seed
"""


def test_the_names_that_users_rely_on_exist() -> None:
    assert set(RELIED_ON.split()) <= set(all_keys())


def test_the_keys_are_few() -> None:
    """Counts those of the sections that every config has; the options of a formula count as one key."""
    options = {f"algorithm.{name}_options" for name in ("advantage", "loss", "correction")}

    def count(section: str) -> int:
        keys = [f"{section}.{name}" if section else name for name in field_names(section)]
        there = [key for key in keys if key_text(key).default != "null" or struct_at(key) is None]
        return sum(1 if key in options or struct_at(key) is None else count(key) for key in there)

    assert count("") <= MOST_KEYS
    assert len(list(leaves(yaml.safe_load(dump(load_config("calculator")))))) <= MOST_SHOWN


def test_every_value_has_a_description() -> None:
    for key in all_keys():
        if struct_at(key) is None:
            assert len(explain(key).splitlines()[1].strip()) > 3, key


def test_a_key_is_explained_with_type_and_default() -> None:
    text = explain("queue.max_staleness")
    assert "one-step-off-policy" in text and "whole number >= 0" in text and "default: 1" in text
    assert "fsdp2 | megatron" in explain("trainer.backend")
    assert "(required)" in explain("model.path")


def test_every_correction_is_explained_with_its_numbers() -> None:
    lines = explain("algorithm.correction").splitlines()
    told = {line.split()[0]: line for line in lines[lines.index("Presets:") + 1 :]}
    assert list(told) == list(PRESETS)
    assert "w = min(R, 2); keeps sequences with R in [0.5, 2]" in told["decoupled_seq_is_rs"]
    assert "bypass; loss reinforce; w = r, 0 outside [0.5, 5]" in told["bypass_pg_token_icepop"]
    assert "mean k3 up to 0.01" in told["decoupled_k3_rs"] and "geometric mean of r" in told["decoupled_geo_rs"]
    aged = Correction(max_age=3, veto=0.001, age_weights=(1, 0.5), reject={"seq_max_k1": 2, "token_k2": 1})
    assert describe(aged) == (
        "decoupled; keeps sequences with every r in [0.5, 2]; keeps tokens with k2 up to 1; "
        "masks sequences with any r < 0.001; masks tokens over 3 steps old; times 1, 0.5, … by age"
    )


def test_a_section_lists_its_keys() -> None:
    text = explain("queue")
    assert all(name in text for name in field_names("queue"))


@pytest.mark.parametrize(("key", "near"), [("queue.max_stalenes", "queue.max_staleness"), ("steps", "trainer.steps")])
def test_an_unknown_key_is_answered_with_near_ones(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        explain(key)
