"""Shards of tensors in checkpoints, and the names of experts in them."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.model_files import experts_of
from rl_async.trainer.checkpoints import MOMENT, Part, StoredShards, own_parts, write_shards
from rl_async.trainer.export import SHARDS, WEIGHTS, WHOLE, write_model
from rl_async.trainer.families import FAMILIES
from rl_async.trainer.model import MODEL_FOLDER, build_headed
from rl_async.weight_sync.experts import PUBLISHED
from tests.support.families import COMMON, SPECIAL

pytestmark = pytest.mark.usefixtures("one_rank")

WHOLE_TENSORS = torch.arange(28.0).reshape(7, 4)
BOXES = [
    (slice(0, 1), slice(0, 3)),
    (slice(0, 1), slice(3, 4)),
    (slice(1, 5), slice(0, 4)),
    (slice(5, 7), slice(0, 2)),
    (slice(5, 7), slice(2, 4)),
]


def stored(parts: list[Part], folder: Path) -> StoredShards:
    write_shards(parts, folder, None)
    return StoredShards(folder)


def boxes(name: str, whole: Tensor) -> list[Part]:
    return [Part(name, box, whole[box].clone()) for box in BOXES]


def test_a_rank_may_hold_several_boxes_of_a_tensor(tmp_path: Path) -> None:
    scalar = Part("steps", (), torch.tensor(3))
    shards = stored([scalar, *boxes("a", WHOLE_TENSORS), *boxes("b", -WHOLE_TENSORS)], tmp_path)
    assert shards.sizes == {"steps": (), "a": WHOLE_TENSORS.shape, "b": WHOLE_TENSORS.shape}
    assert (
        shards.whole("a").equal(WHOLE_TENSORS)
        and shards.whole("b").equal(-WHOLE_TENSORS)
        and int(shards.whole("steps")) == 3
    )
    where = (slice(0, 6), slice(2, 4))
    part = torch.zeros(6, 2, dtype=torch.bfloat16)
    shards.read_into(part, "a", where, WHOLE_TENSORS.shape)
    assert part.equal(WHOLE_TENSORS[where].bfloat16())


def test_an_expert_can_be_read_out_of_a_stack_by_its_own_name(tmp_path: Path) -> None:
    names = {"gate_up_proj": (3, 8, 5), "down_proj": (3, 5, 4)}
    stacks = {name: torch.arange(float(math.prod(size))).reshape(size) for name, size in names.items()}
    parts = []
    for name, whole in stacks.items():
        for kind, sign in (("", 1), (f"{MOMENT}exp_avg", -1)):
            for experts in (slice(0, 2), slice(2, 3)):
                place = experts, *(slice(0, size) for size in whole.shape[1:])
                parts.append(Part(f"mlp.experts.{name}{kind}", place, sign * whole[experts]))
    shards = stored(parts, tmp_path)
    up = torch.zeros(4, 5)
    shards.read_into(up, "mlp.experts.2.up_proj.weight")
    assert up.equal(stacks["gate_up_proj"][2, 4:])
    rows = torch.zeros(2, 3)
    shards.read_into(rows, "mlp.experts.1.down_proj.weight|exp_avg", (slice(3, 5), slice(1, 4)), (5, 4))
    assert rows.equal(-stacks["down_proj"][1, 3:5, 1:4])
    with pytest.raises(ValueError, match=r"2\.up_proj\.weight"):
        shards.read_into(torch.zeros(8, 5), "mlp.experts.2.up_proj.weight")
    with pytest.raises(KeyError):
        shards.read_into(up, "mlp.experts.3.up_proj.weight")


def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    shards = stored(boxes("a", WHOLE_TENSORS)[:2] + boxes("a", WHOLE_TENSORS)[3:], tmp_path)
    with pytest.raises(ValueError, match=r"\ba\b.* 16 "):
        shards.whole("a")
    with pytest.raises(ValueError, match=r"\ba\b.*\[7, 4\].*\[4, 7\]"):
        shards.read_into(torch.zeros(4, 7), "a")
    rest = torch.zeros(2, 4)
    shards.read_into(rest, "a", (slice(5, 7), slice(0, 4)), (7, 4))
    assert rest.equal(WHOLE_TENSORS[5:])


SPARSE = sorted(PUBLISHED)


def shallow(kind: str) -> dict[str, int]:
    """Options for two layers, unless the config lists each."""
    return {} if SPECIAL[kind].keys() & {"layer_types", "layers_block_type"} else {"num_hidden_layers": 2}


def checkpoint(kind: str, folder: Path) -> Path:
    """The shards of a random model, with its published form beside them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | SPECIAL[kind] | shallow(kind)))
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "published")
    config.save_pretrained(folder / MODEL_FOLDER)
    state = {f"{WEIGHTS}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state |= {f"{WEIGHTS}{name}": buffer for name, buffer in model.named_buffers() if "bias" in name}
    write_shards(list(own_parts(state)), folder / SHARDS, None)
    return folder


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("mixtral", "qwen3_moe"))) for kind in SPARSE]
)
def test_names_and_weights_are_those_of_published_files(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    write_model(folder)
    published = load_file(folder / "published" / WHOLE)
    found = load_file(folder / MODEL_FOLDER / WHOLE)
    assert found.keys() == published.keys()
    assert all(found[name].equal(tensor) for name, tensor in published.items())


@pytest.mark.parametrize(
    "kind",
    [
        *("mixtral", "qwen3_moe", "gpt_oss"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in SPARSE if kind not in ("mixtral", "qwen3_moe")),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("granitemoehybrid", "nemotron_h", "qwen3_5_text")),
    ],
)
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
    stacked = {"gpt_oss", "granitemoe", "granitemoehybrid", "kimi_linear", "nemotron_h"}
    assert sparse == PUBLISHED.keys() | stacked
