"""AdamW in 8 bits on gloo ranks: a resumed run continues bit by bit, also on others that divide whole blocks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import VOCAB, save_tokenizer
from tests.contracts.trainer.test_saver import go_on, same
from tests.support.torchao import add_torchao

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OPTIMIZER = {"optimizer": "adamw_8bit", "checkpoint_hf": False}


def make_model(folder: Path, experts: int) -> Path:
    """A model with matrices of whole blocks, and vectors; two ranks divide the rows of each of three experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.mark.parametrize("experts", [4, 3])
def test_a_resumed_run_continues_bit_by_bit(tmp_path: Path, experts: int) -> None:
    add_torchao()
    model = make_model(tmp_path / "model", experts)
    through, halves = tmp_path / "through", tmp_path / "halves"
    for root in (through, halves):
        root.mkdir()
    go_on(model, through, 2, 0, 2, **OPTIMIZER)
    go_on(model, halves, 2, 0, 1, **OPTIMIZER)
    saved = load_file(halves / "saved-2.safetensors")
    moments = {name for name in saved if "exp_avg" in name}
    codes, vectors = {n for n in moments if n.endswith("_codes")}, {n for n in moments if "norm.weight|" in n}
    assert codes and vectors and not codes & vectors and all(saved[name].dtype == torch.uint8 for name in codes)
    assert any("experts" in name for name in codes)
    go_on(model, halves, 2, 1, 2, **OPTIMIZER)
    assert same(saved, load_file(halves / "loaded-2.safetensors"))
    assert same(load_file(through / "saved-2.safetensors"), load_file(halves / "saved-2.safetensors"))


def test_other_ranks_continue_where_they_divide_whole_blocks_and_else_refuse(tmp_path: Path) -> None:
    add_torchao()
    for experts in (4, 3):
        model, root = make_model(tmp_path / f"model-{experts}", experts), tmp_path / str(experts)
        root.mkdir()
        go_on(model, root, 2, 0, 1, **OPTIMIZER)
    four, three = tmp_path / "4", tmp_path / "3"
    saved = load_file(four / "saved-2.safetensors")
    go_on(tmp_path / "model-4", four, 1, 1, 2, **OPTIMIZER)
    assert same(saved, load_file(four / "loaded-1.safetensors"))
    go_on(tmp_path / "model-4", four, 4, 2, 3, replicas=2, **OPTIMIZER)
    assert same(load_file(four / "saved-1.safetensors"), load_file(four / "loaded-4.safetensors"))
    # One rank has its blocks of three experts one expert after the other, and two had the halves of each.
    with pytest.raises(AssertionError, match=r"trainer\.ranks"):
        go_on(tmp_path / "model-3", three, 1, 1, 2, **OPTIMIZER)
    with pytest.raises(AssertionError, match=r"trainer\.optimizer"):
        go_on(tmp_path / "model-4", four, 2, 1, 2, checkpoint_hf=False)
