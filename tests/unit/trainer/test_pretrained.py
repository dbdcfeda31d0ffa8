"""Weights that do not fit the config are refused by name, before anything is allocated."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_async.errors import UserError
from rl_async.model_files import INDEX, ONE_FILE
from rl_async.trainer.export import copy_text_files
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import build_headed
from tests.support.families import saved
from tests.support.tiny_models import byte_tokenizer

NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def with_experts_of(inner: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Make the experts of another inner size than config.json says."""

    def sized(name: str, tensor: Tensor) -> Tensor:
        if ".experts." not in name:
            return tensor
        rows, columns = tensor.shape
        return (
            torch.ones(rows, inner) if name.endswith(("down_proj.weight", "w2.weight")) else torch.ones(inner, columns)
        )

    return lambda tensors: {name: sized(name, tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("qwen3", without(NORM), NORM),
        ("qwen3", lambda tensors: tensors | {NORM: torch.ones(63)}, NORM),
        ("qwen3_moe", without(EXPERT), "model.layers.2.mlp.experts.gate_up_proj"),
        ("qwen3_moe", with_experts_of(64), "model.layers.0.mlp.experts.down_proj"),
        ("qwen3_moe", with_experts_of(16), "model.layers.0.mlp.experts.down_proj"),
        ("mixtral", with_experts_of(200), "model.layers.0.mlp.experts.gate_up_proj"),
        ("qwen3_moe", lambda tensors: tensors | {EXPERT: torch.ones(32, 63)}, "layers.2.mlp.experts.gate_up_proj"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], named: str
) -> None:
    saved(kind, tmp_path)
    build_headed(str(tmp_path), "policy")
    save_file(change(load_file(tmp_path / ONE_FILE)), tmp_path / ONE_FILE, {"format": "pt"})
    with pytest.raises(UserError, match=rf"model\.path.*{named}"):
        build_headed(str(tmp_path), "policy")


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    file = tmp_path / "config.json"
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))
    with pytest.raises(UserError, match=r"model\.path.*quantization_config"):
        build_headed(str(tmp_path), "policy")


def test_experts_in_4_bits_are_read_as_the_format_says_and_trained_in_more(tmp_path: Path, one_rank: None) -> None:
    """MXFP4: a sign, two bits of exponent and one of mantissa, times a power of two for every 32 numbers of a row."""
    saved("gpt_oss", tmp_path)
    file, draw = tmp_path / "config.json", torch.Generator().manual_seed(3)
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))
    tensors, expected = load_file(tmp_path / ONE_FILE), dict[str, Tensor]()
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes])
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        codes = torch.randint(16, (experts, rows, columns), generator=draw)
        scales = torch.randint(120, 128, (experts, rows, columns // 32), generator=draw)
        exact = values[codes] * torch.exp2(scales - 127.0).repeat_interleave(32, -1)
        expected[name] = exact.transpose(1, 2)
        low, high = codes[..., ::2], codes[..., 1::2]
        tensors[name + "_blocks"] = (low | high << 4).to(torch.uint8).unflatten(-1, (-1, 16))
        tensors[name + "_scales"] = scales.to(torch.uint8)
    save_file(tensors, tmp_path / ONE_FILE, {"format": "pt"})
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", None)
    found = dict(backend.model.lm.named_parameters())
    for name, exact in expected.items():
        assert found[name].full_tensor().equal(exact), name
    assert not hasattr(backend.hf_config, "quantization_config"), "a saved model is not quantized"


@pytest.mark.parametrize("index", ["{", '{"weight_map": {"x": "gone.safetensors"}}'])
def test_an_index_that_cannot_be_followed_names_its_file(tmp_path: Path, index: str) -> None:
    saved("qwen3", tmp_path)
    (tmp_path / ONE_FILE).unlink()
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(UserError, match=r"model\.path.*(index|gone)"):
        build_headed(str(tmp_path), "policy")


def test_no_parameter_has_memory_before_it_is_filled(tmp_path: Path) -> None:
    saved("gemma3_text", tmp_path)
    model, _ = build_headed(str(tmp_path), "policy")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    torch.nn.Linear(2, 2).weight.sum().item()  # and modules that are made later have some


# What an exported model has beside its weights.


TEMPLATE = "{% for message in messages %}{{ message.content + '<|im_end|>' }}{% endfor %}"


def test_an_export_has_the_tokenizer_and_the_end_tokens_of_its_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    byte_tokenizer(TEMPLATE).save_pretrained(base)
    copy_text_files(base, tmp_path / "without")
    (base / "preprocessor_config.json").write_text('{"patch_size": 14}')
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    copy_text_files(base, tmp_path / "with")
    for name in ("with", "without"):
        assert (tmp_path / name / "tokenizer.json").is_file()
    assert not (tmp_path / "without/generation_config.json").exists()
    assert (tmp_path / "with/generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert (tmp_path / "with/preprocessor_config.json").read_text() == '{"patch_size": 14}'
