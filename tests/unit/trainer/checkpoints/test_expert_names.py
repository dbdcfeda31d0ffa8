"""Exports of models with experts have the names of published files, so that others can load them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.model_files import experts_of
from rl_async.trainer.checkpoints import own_parts, write_shards
from rl_async.trainer.export import SHARDS, WEIGHTS, WHOLE, write_model
from rl_async.trainer.families import FAMILIES
from rl_async.trainer.model import MODEL_FOLDER, build_headed
from rl_async.weight_sync.experts import PUBLISHED
from tests.unit.trainer.model.test_families import COMMON, SPECIAL

pytestmark = pytest.mark.usefixtures("one_rank")

SPARSE = sorted(PUBLISHED)


def checkpoint(kind: str, folder: Path) -> Path:
    """The shards of a random model, with its published form beside them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | SPECIAL[kind] | {"num_hidden_layers": 2}))
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "published")
    config.save_pretrained(folder / MODEL_FOLDER)
    state = {f"{WEIGHTS}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state |= {f"{WEIGHTS}{name}": buffer for name, buffer in model.named_buffers() if "bias" in name}
    write_shards(list(own_parts(state)), folder / SHARDS, None)
    return folder


@pytest.mark.parametrize("kind", SPARSE)
def test_names_and_weights_are_those_of_published_files(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    write_model(folder)
    published = load_file(folder / "published" / WHOLE)
    found = load_file(folder / MODEL_FOLDER / WHOLE)
    assert found.keys() == published.keys()
    assert all(found[name].equal(tensor) for name, tensor in published.items())


@pytest.mark.parametrize("kind", SPARSE)
def test_exports_are_loaded_whole(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    write_model(folder)
    build_headed(str(folder / MODEL_FOLDER), "policy")
    _, info = AutoModelForCausalLM.from_pretrained(folder / MODEL_FOLDER, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_experts_of_a_family_without_known_names_stay_stacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("qwen3_moe", tmp_path)
    monkeypatch.delitem(PUBLISHED, "qwen3_moe")
    write_model(folder)
    with safe_open(folder / MODEL_FOLDER / WHOLE, "pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118  # not a mapping
    build_headed(str(folder / MODEL_FOLDER), "policy")


def test_names_are_known_for_all_families_with_experts() -> None:
    sparse = {kind for kind in FAMILIES if experts_of(AutoConfig.for_model(kind, **(COMMON | SPECIAL.get(kind, {}))))}
    assert sparse == PUBLISHED.keys()
