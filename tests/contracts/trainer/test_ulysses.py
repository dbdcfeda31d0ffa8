"""Ranks that share packed rows: the same numbers and gradients as with rows of their own, for every kind of model."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig

from rl_async.trainer.families import FAMILIES, why_not_shared
from rl_async.trainer.packing import pack
from tests.contracts.trainer.test_training import LAYERS, RATE, STEPS, TERMS, train
from tests.support.families import COMMON, DISTINCT, SPECIAL, config_of, saved
from tests.support.forked import run_ranks
from tests.support.once import once
from tests.support.rounding import assert_trained_alike, pass_rounding
from tests.unit.trainer.test_batches import padded

THREE_KEYS = {"num_attention_heads": 6, "num_key_value_heads": 3}  # two ranks share out neither one nor the other
MODELS = {
    **{kind: (kind, {}) for kind in FAMILIES},
    "value of qwen3": ("qwen3", {}),
    "both of qwen3": ("qwen3", {}),
    "qwen3 of three heads of keys": ("qwen3", THREE_KEYS),
    "qwen3 of one head of keys": ("qwen3", {"num_key_value_heads": 1}),
}
GROUPS = {
    "distinct": [name for name, (kind, _) in MODELS.items() if kind in DISTINCT],
    "others": [name for name, (kind, _) in MODELS.items() if kind not in DISTINCT],
}


def shallow(kind: str) -> dict[str, Any]:
    """Options for two layers, one of each kind that the model has; SmolLM3's fourth is its first without positions."""
    types = SPECIAL.get(kind, {}).get("layer_types")
    return {} if kind == "smollm3" else {"num_hidden_layers": 2} | ({"layer_types": types[:2]} if types else {})


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, dict[str, float]]]:
    """The ranks' findings on the models of a group, by model; a group is computed when its first is wanted."""

    @once
    def of_group(group: str) -> dict[str, dict[str, float]]:
        folder, names = tmp_path_factory.mktemp("models"), GROUPS[group]
        for name in names:
            kind, options = MODELS[name]
            saved(kind, folder / name, **shallow(kind), **options)
        out, module = folder / "differences.json", "tests.contracts.trainer.workers.ulysses"
        run_ranks(module, "cpu", str(folder), str(out), *names, ranks=2, timeout_s=500)
        found: dict[str, dict[str, float]] = json.loads(out.read_text())
        return found

    return of_group


@pytest.mark.timeout(600)  # the first test of a group waits for all its models
@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, id=name, marks=[pytest.mark.nightly] * (group == "others"))
        for group, names in GROUPS.items()
        for name in names
    ],
)
def test_shared_rows_are_computed_as_own_ones(
    differences: Callable[[str], dict[str, dict[str, float]]], group: str, name: str
) -> None:
    found = differences(group)[name]
    assert found["size"] > 1e-3
    assert found["excess"] <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(2, 5))
def test_every_token_is_one_ranks_and_has_its_position_and_target(lengths: list[int], ranks: int) -> None:
    batch = padded(lengths)
    whole = pack(batch)
    parts = [whole.share(rank, ranks) for rank in range(ranks)]
    assert len({part.tokens.shape for part in parts}) == 1, "ranks exchange parts of one size"
    total, groups = sum(lengths), {part.groups for part in parts}
    assert len(groups) == 1
    assert sum(length * sequences for length, sequences in groups.pop()) == ranks * parts[0].tokens.shape[1]
    for name, dim in (("tokens", 1), ("positions", 1), ("targets", 0), ("temperature", 0)):
        joined = torch.cat([getattr(part, name) for part in parts], dim)
        assert joined.narrow(dim, 0, total).equal(getattr(whole, name))
        assert not joined.narrow(dim, total, joined.shape[dim] - total).sub(float(name == "temperature")).any()
    assert total <= ranks * parts[0].tokens.shape[1] < total + ranks
    experts = torch.cat([part.experts for part in parts if part.experts is not None])
    assert experts[:total].equal(whole.experts) and (experts[total:] == -1).all()
    filled = torch.cat([part.tokens[0] for part in parts])
    assert whole.unpack(filled).equal(whole.unpack(whole.tokens[0]))


@pytest.mark.parametrize(
    ("kind", "options", "ranks", "reason"),
    [
        ("qwen3", {}, 3, "4 attention heads"),
        ("qwen3", {}, 8, "4 attention heads"),
        ("stablelm", {}, 2, "cannot be packed"),
        ("idefics3", {}, 2, "read images"),
    ],
)
def test_what_cannot_be_shared_is_told(kind: str, options: dict[str, object], ranks: int, reason: str) -> None:
    assert reason in (why_not_shared(config_of(kind, **options), ranks) or "")


def test_keys_of_few_heads_are_shared_by_more_ranks() -> None:
    assert why_not_shared(AutoConfig.for_model("qwen3", **COMMON), 4) is None


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_learn_and_report_what_one_rank_does(model_folder: Path, tmp_path: Path, ranks: int) -> None:
    one, shared = tmp_path / "one.safetensors", tmp_path / "shared.safetensors"
    expected = ast.literal_eval(train(model_folder, one, 1, 60, "decoupled_seq_is"))
    told = ast.literal_eval(train(model_folder, shared, ranks, 60, "decoupled_seq_is", '{"sequence_parallel": 2}'))
    of_ranks = {"batch/token_imbalance", "batch/work_imbalance"}
    assert told.keys() == expected.keys()
    rounded = pass_rounding(1.0, LAYERS, TERMS, backward=True)
    for name in told.keys() - of_ranks:
        assert told[name] == pytest.approx(expected[name], rel=rounded, abs=rounded), name
    assert_trained_alike(load_file(shared), load_file(one), rate=RATE, steps=STEPS, layers=LAYERS, terms=TERMS)
