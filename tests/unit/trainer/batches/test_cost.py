"""The work of a row, against the weights of real, tiny models."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.trainer.batch_layout import RowCost, row_cost_of
from tests.unit.trainer.model.test_families import COMMON, SPECIAL


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama", "mistral", "phi3", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_linear_work_is_two_operations_per_weight_that_a_token_meets(kind: str) -> None:
    config = AutoConfig.for_model(kind, **(COMMON | SPECIAL.get(kind, {})))
    model = AutoModelForCausalLM.from_config(config)
    met = 0.0
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or "embed" in name or "shared_expert_gate" in name:
            continue
        routed = ".experts." in name  # 2 of 4 experts
        met += weight.numel() * (0.5 if routed else 1.0)
    assert row_cost_of(config).linear == 2 * met


def test_quadratic_work_counts_scores_and_values_of_half_the_pairs() -> None:
    llama = AutoConfig.for_model("llama", **COMMON)
    assert row_cost_of(llama).quadratic == 4 * 4 * (16 + 16)  # layers, heads, elements of a key and of a value
    deepseek = AutoConfig.for_model("deepseek_v3", **(COMMON | SPECIAL["deepseek_v3"]))
    assert row_cost_of(deepseek).quadratic == 4 * 4 * (24 + 12)


def test_the_work_of_a_row() -> None:
    assert RowCost(linear=10, quadratic=2).of(3) == 48
    assert RowCost().of(3) == 3
