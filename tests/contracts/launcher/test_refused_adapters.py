"""Adapters that this trainer does not have are refused in words before a run has processes."""

import json
from pathlib import Path

import pytest

from rl_async.errors import ConfigError, UserError
from rl_async.launcher.model_info import describe
from rl_async.launcher.plan.machine import check_trainer
from rl_async.launcher.runs.rehearsal import rehearse_here
from tests.support.configs import float32_config
from tests.support.families import saved

QUANTIZED = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["trainer.lora={dora: true}"], "trainer.lora.dora.*DoRA.*rank_stabilized"),
        (["trainer.lora={load_in_4bit: true}"], "trainer.lora.load_in_4bit.*QLoRA.*model.dtype"),
        (["trainer.lora={}", "trainer.backend=megatron"], "trainer.lora.*fsdp2"),
    ],
)
def test_other_kinds_of_adapters_are_named(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        float32_config("calculator", overrides)


def test_a_base_in_4_bits_is_refused_and_model_info_says_the_same(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="install it with pip install 'rl-async[lora]'")
    saved("qwen3", tmp_path)
    file = tmp_path / "config.json"
    config = float32_config("calculator", ["trainer.lora={}", f"model.path={tmp_path}", "warm_start=null"])
    check_trainer(config, 0)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": QUANTIZED}))
    with pytest.raises(UserError, match=r"model\.path.*quantization_config") as caught:
        check_trainer(config, 0)
    assert any("fsdp2" in line and f"no: {caught.value}" in line for line in describe(tmp_path, config))


def test_experts_are_no_targets_and_the_layers_that_are_get_named(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    given = [f"model.path={tmp_path}", "warm_start=null"]
    rehearse_here(float32_config("calculator", [*given, "trainer.lora={targets: [q_proj]}"]), whole=False)
    for experts in ("experts", "gate_up_proj"):
        config = float32_config("calculator", [*given, f"trainer.lora={{targets: [{experts}]}}"])
        with pytest.raises(UserError, match=rf"trainer\.lora\.targets: {experts}.*q_proj"):
            rehearse_here(config, whole=False)
