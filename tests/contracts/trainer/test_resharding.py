"""Checkpoints of two real gloo ranks, gone on from by one, that one's by four in two replicas, and theirs by two: every
number is the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_async.errors import UserError
from rl_async.trainer.checkpoints import newest_whole
from rl_async.trainer.export import export
from tests.support.forked import run_ranks


def go_on(model: Path, root: Path, ranks: int, before: int, after: int, **options: Any) -> None:
    """Run ``reshard_worker`` on ``ranks`` processes."""
    arguments = [str(model), str(root), str(before), str(after), json.dumps(options)]
    run_ranks("tests.contracts.trainer.workers.reshard", *arguments, ranks=ranks)


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


@pytest.mark.timeout(600)
def test_checkpoints_go_on_with_other_numbers_of_ranks_and_replicas(model_folder: Path, tmp_path: Path) -> None:
    root, run = tmp_path / "checkpoints", tmp_path
    root.mkdir()
    go_on(model_folder, root, 2, 0, 1, checkpoint_hf=False)
    go_on(model_folder, root, 1, 1, 2)
    go_on(model_folder, root, 4, 2, 3, replicas=2)
    names = ("saved-2", "loaded-1", "saved-1", "loaded-4", "saved-4")
    left = {name: load_file(root / f"{name}.safetensors") for name in names}
    assert same(left["saved-2"], left["loaded-1"]) and same(left["saved-1"], left["loaded-4"])
    go_on(model_folder, root, 2, 3, 4)
    assert same(left["saved-4"], load_file(root / "loaded-2.safetensors"))
    moments = [name for name in left["loaded-4"] if name.endswith("|exp_avg")]
    assert moments and all(left["loaded-4"][name].any() for name in moments), "AdamW's state came along"
    assert not same(left["saved-2"], left["saved-1"]), "a step changes the weights"

    assert newest_whole(root) == root / "step-000004"
    assert len(list((root / "step-000004" / "shards").iterdir())) == 2, "every rank wrote its part"
    assert not list(root.glob(".*")), "nothing unfinished is left"
    assert not (root / "step-000001" / "model" / "model.safetensors").exists()
    assert export(run, tmp_path / "first", step=1) == 1
    for folder, left_by in ((tmp_path / "first", "saved-2"), (root / "step-000002" / "model", "saved-1")):
        weights = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        assert all(weights[name].equal(tensor) for name, tensor in weights_of(left[left_by]).items())
    with pytest.raises(UserError, match=r"step 7\b.* 1, 2, 3, 4"):
        export(run, tmp_path / "none", step=7)


def weights_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under their names in a Hugging Face model."""
    return {name.removeprefix("lm."): tensor for name, tensor in tensors.items() if "|" not in name}
