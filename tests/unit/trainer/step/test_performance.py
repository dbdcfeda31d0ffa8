"""Model FLOPs, their share of a device's peak, and peak memory."""

from types import SimpleNamespace
from typing import Any

import pytest

from rl_async.trainer.batch_layout import MiniBatch, row_cost_of
from rl_async.trainer.batches import Batch
from rl_async.trainer.models import Models, compute_rates, model_flops, peak_flops

LENGTHS = (100, 60, 40)
QWEN = SimpleNamespace(  # Qwen2.5-0.5B
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151936,
)


def batch() -> Batch:
    headers = [SimpleNamespace(tokens=n, baseline=False, prompt_tokens=0, prompt=n) for n in LENGTHS]
    plan = [MiniBatch(ranks=[[[0]], [[1, 2]]], rows=[0, 1, 2])]
    return Batch(step=0, headers=headers, plan=plan, rows={})  # type: ignore[arg-type]


def models(**others: Any) -> Models:
    policy = SimpleNamespace(row_cost=row_cost_of(QWEN))
    return Models(policy, **dict.fromkeys(others, policy))  # type: ignore[arg-type]


def flops(them: Models, *, epochs: int = 1, trains_policy: bool = True, recomputes: bool = False) -> float:
    return model_flops(them, batch(), epochs=epochs, trains_policy=trains_policy, recomputes=recomputes)


def test_it_is_six_times_the_weights_per_token_and_attention() -> None:
    """Against the model's published size: 357.9 M parameters beside the embeddings, which are the last layer too."""
    added = 24 * (2 * 896 + (14 + 2 * 2) * 64) + 896  # norms and biases, which multiply nothing
    parameters = 357_898_112 - added + 896 * 151936
    attention = 12 * 24 * 14 * 64 * sum(n * n for n in LENGTHS) // 2  # 12 L H Q T, of which the causal mask leaves half
    assert flops(models()) == 6 * parameters * sum(LENGTHS) + attention


def test_every_pass_counts() -> None:
    one = flops(models()) / 3  # a forward pass
    assert flops(models(), epochs=2) == pytest.approx(6 * one)
    assert flops(models(), recomputes=True) == pytest.approx(4 * one)
    assert flops(models(), trains_policy=False) == pytest.approx(one)
    assert flops(models(reference=True)) == pytest.approx(4 * one)
    assert flops(models(critic=True)) == pytest.approx(7 * one)


def test_mfu_is_a_share_of_a_known_peak_and_absent_without_one() -> None:
    metrics = {"compute/model_flops": 4 * 989.4e12, "time/update_s": 2.0}
    rates = compute_rates(metrics, 4, "NVIDIA H200", "bfloat16")
    assert rates == {"compute/tflops_per_s": pytest.approx(494.7), "compute/mfu": pytest.approx(0.5)}
    assert "compute/mfu" not in compute_rates(metrics, 4, "cpu", "bfloat16")
    assert "compute/mfu" not in compute_rates(metrics, 4, "NVIDIA H200", "float32")


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_device_is_known_by_its_name(device: str, peak: float | None) -> None:
    assert peak_flops(device, "bfloat16") == peak
