"""A critic on real gloo ranks: what is learned depends on neither ranks nor micro-batches, and survives a save."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.contracts.trainer.test_training import LAYERS, TERMS
from tests.support.forked import run_ranks
from tests.support.rounding import assert_trained_alike

CRITIC_KEYS = {f"critic/{name}" for name in ("loss", "explained_variance", "values_mean", "returns_mean", "grad_norm")}


def train(model: Path, out: Path, ranks: int, *arguments: str) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Run ``critic_worker`` on ``ranks`` processes."""
    run_ranks("tests.contracts.trainer.workers.critic", str(model), str(out), *arguments, ranks=ranks, timeout_s=120)
    return load_file(out / "tensors.safetensors"), json.loads((out / "metrics.json").read_text())


@pytest.mark.thinned("kind", 2)
@pytest.mark.parametrize(("kind", "correction"), [("own", "bypass_ppo_clip"), ("shared", "decoupled_token_is")])
def test_both_models_learn_the_same_on_any_ranks(
    model_folder: Path, tmp_path: Path, kind: str, correction: str
) -> None:
    whole, metrics = train(model_folder, tmp_path / "one", 1, "10000", kind, correction)
    split, split_metrics = train(model_folder, tmp_path / "two", 2, "60", kind, correction)
    # Four steps of two mini-batches each.
    assert_trained_alike(split, whole, rate=1e-3, steps=8, layers=LAYERS, terms=TERMS)
    for one, two in zip(metrics, split_metrics, strict=True):
        for name in ("batch/token_imbalance", "batch/work_imbalance"):
            assert one.pop(name) == 0.0 <= two.pop(name)  # of one rank, and of two
        assert one == pytest.approx(two, rel=1e-3, abs=1e-4)

    for tensors in (whole, split):
        for name in (n.removeprefix("kept.") for n in tensors if n.startswith("kept.")):
            assert tensors[f"kept.{name}"].equal(tensors[f"loaded.{name}"]), f"{name} did not survive the disk"
    heads = {name for name in whole if name.startswith("kept.") and "value_head" in name}
    owner = "critic" if kind == "own" else "."
    assert heads == {f"kept.{owner}.value_head.weight", f"kept.{owner}.value_head.bias"}
    assert all(whole[name].any() for name in heads)
    expected = CRITIC_KEYS if kind == "own" else CRITIC_KEYS - {"critic/grad_norm"}
    assert all({k for k in step if k.startswith("critic/")} == expected for step in metrics)


@pytest.mark.slow
def test_a_process_reward_model_learns_the_same_on_any_ranks_and_survives_a_save(
    model_folder: Path, tmp_path: Path
) -> None:
    whole, metrics = train(model_folder, tmp_path / "one", 1, "10000", "process", "decoupled_token_is")
    split, split_metrics = train(model_folder, tmp_path / "two", 2, "60", "process", "decoupled_token_is")
    assert_trained_alike(split, whole, rate=1e-3, steps=8, layers=LAYERS, terms=TERMS)
    for one, two in zip(metrics, split_metrics, strict=True):
        for name in ("accuracy", "loss", "process_reward_mean", "grad_norm"):
            assert one[f"critic/{name}"] == pytest.approx(two[f"critic/{name}"], rel=1e-3, abs=1e-4)
    kept = {name.removeprefix("kept.") for name in whole if name.startswith("kept.")}
    assert any(name.startswith("critic.") for name in kept) and not any("value_head" in name for name in kept)
    for tensors in (whole, split):
        for name in kept:
            assert tensors[f"kept.{name}"].equal(tensors[f"loaded.{name}"]), f"{name} did not survive the disk"


def test_the_policy_stands_still_while_its_critic_warms_up(model_folder: Path, tmp_path: Path) -> None:
    _, metrics = train(model_folder, tmp_path, 1, "10000", "own", "bypass_ppo_clip")
    assert [step["loss/grad_norm"] > 0 for step in metrics] == [False, True, True]
    assert all(step["critic/grad_norm"] > 0 for step in metrics)
    assert metrics[0]["critic/values_mean"] == 0.0, "a new head says 0"
    assert metrics[0]["correction/logprob_diff_max"] > 0, "the policy is still compared with the engines"
