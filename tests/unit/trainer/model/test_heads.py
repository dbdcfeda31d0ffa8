"""Heads on a real, tiny model: what each gives, what the engines get, what a saved critic starts from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import Head, build_headed
from rl_async.trainer.packing import Tensors, collate
from tests.conftest import make_rows
from tests.support.pickled import pickled
from tests.support.rounding import allowance, assert_near, in_float64, to_float64
from tests.support.whole_weights import whole_weights

pytestmark = pytest.mark.usefixtures("one_rank")

TRAINING = TrainerConfig(learning_rate=1e-2, minibatches=1)


def batch() -> Tensors:
    return collate(make_rows(0)[:3], device="cpu")


def towards_one(_: int, outputs: Outputs) -> Tensor:
    """A loss that only the values are in."""
    assert outputs.values is not None
    return ((outputs.values - 1.0) ** 2).mean()


def trained(folder: Path, head: Head, dtype: str = "float32") -> Fsdp2Backend:
    """A model of which two steps moved the values."""
    backend = Fsdp2Backend(str(folder), dtype, "cpu", TRAINING, head)
    requested = frozenset({"values"} if head == "both" else ())
    for _ in range(2):
        backend.step([batch()], towards_one, requested)  # type: ignore[arg-type]
    return backend


def test_a_critic_gives_values_alone_and_a_new_one_says_zero(model_folder: Path) -> None:
    x = batch()
    outputs = Fsdp2Backend(str(model_folder), "float32", "cpu", None, "value").forward(x)
    assert outputs.logprobs is None and outputs.entropy is None
    assert outputs.values is not None
    assert outputs.values.shape == x.mask.shape
    assert not outputs.values.any()


@pytest.mark.parametrize("head", ["value", "both"])
def test_values_are_a_linear_function_of_the_state_before_each_token(model_folder: Path, head: Head) -> None:
    backend, x = trained(model_folder, head), batch()
    values = backend.forward(x, frozenset({"values"})).values
    assert values is not None
    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    names = {n if head == "both" else f"model.{n}": t for n, t in whole_weights(backend).items()}
    lm.load_state_dict(names, strict=False)
    weight, bias = (p.full_tensor().detach() for p in backend.model.value_head.parameters())

    def by_model(lm: Any, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            hidden = lm.model(x.tokens, use_cache=False).last_hidden_state[:, :-1]
        return (hidden @ weight[0].to(dtype) + bias[0].to(dtype))[predicted]

    predicted = torch.arange(values.shape[1]) < x.lengths[:, None] - 1
    plain, exactly = by_model(lm, torch.float32), to_float64(lm)
    with in_float64():
        exact = by_model(exactly, torch.float64)
    assert_near(values[predicted], exact, allowance(plain, exact, terms=lm.config.intermediate_size), "values")
    assert not values[~predicted].any(), "there is no token"
    assert values.abs().max() > 0


def test_a_value_never_sees_the_token_it_precedes(model_folder: Path) -> None:
    backend, x = trained(model_folder, "value"), batch()
    before = backend.forward(x).values
    x.tokens[:, 6:] = (x.tokens[:, 6:] + 1) % 64
    after = backend.forward(x).values
    assert before is not None and after is not None
    assert before[:, :6].equal(after[:, :6])
    assert not before[:, 6:].equal(after[:, 6:])


def test_a_value_head_changes_neither_log_probabilities_nor_what_engines_get(model_folder: Path) -> None:
    x = batch()
    policy = Fsdp2Backend(str(model_folder), "float32", "cpu", TRAINING)
    both = Fsdp2Backend(str(model_folder), "float32", "cpu", TRAINING, "both")
    expected = policy.forward(x).logprobs
    for requested in (frozenset(), frozenset({"values"})):
        got = both.forward(x, requested)  # type: ignore[arg-type]
        assert got.logprobs is not None and expected is not None
        assert got.logprobs.equal(expected)
        assert (got.values is not None) == bool(requested)
    exported, plain = whole_weights(both), whole_weights(policy)
    assert exported.keys() == plain.keys() == load_file(model_folder / "model.safetensors").keys()
    for name, tensor in plain.items():
        assert exported[name].equal(tensor)


def test_values_are_regressed_in_float32_whatever_the_backbone_computes_in(model_folder: Path) -> None:
    backend = trained(model_folder, "both", "bfloat16")
    values = backend.forward(batch(), frozenset({"values"})).values
    assert values is not None and values.dtype == torch.float32
    assert not values.equal(values.bfloat16().float()), "rounded to bfloat16"


def test_a_critic_starts_from_a_saved_one_with_its_head(model_folder: Path, tmp_path: Path) -> None:
    first = trained(model_folder, "value")
    first.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "shards", "value_head.safetensors"]
    expected, got = (
        b.forward(batch()).values for b in (first, Fsdp2Backend(str(tmp_path), "float32", "cpu", None, "value"))
    )
    assert expected is not None and got is not None
    assert got.equal(expected)


def test_the_head_of_a_shared_critic_is_no_part_of_the_model_that_others_read(
    model_folder: Path, tmp_path: Path
) -> None:
    backend = trained(model_folder, "both")
    backend.save(tmp_path)
    assert not [p.name for p in (tmp_path / "model").glob("*value*")]
    assert not [n for n in load_file(tmp_path / "model" / "model.safetensors") if "value_head" in n]
    assert set(load_file(tmp_path / "value_head.safetensors")) == {"weight", "bias"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(("head", "key"), [("value", "critic.path"), ("both", "model.path")])
def test_a_model_that_cannot_be_loaded_names_its_key(tmp_path: Path, head: Head, key: str) -> None:
    with pytest.raises(UserError, match=key):
        build_headed(str(tmp_path), head)


@pytest.mark.parametrize(("head", "key"), [("value", "critic.path"), ("both", "model.path")])
def test_weights_that_are_pickles_are_not_read(tmp_path: Path, model_folder: Path, head: Head, key: str) -> None:
    with pytest.raises(UserError, match=key):
        build_headed(str(pickled(model_folder, tmp_path / "model")), head)
