"""What is said of a model folder agrees with what the trainer and the engines check when they load it."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl_async.errors import UserError
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.model_info import describe
from rl_async.launcher.plan.memory import engine_bytes, model_size
from rl_async.launcher.sources import SOURCE_FILE, import_model
from rl_async.trainer.model import build_headed
from tests.support.configs import float32_config
from tests.support.families import config_of
from tests.support.vision_models import save_vision_model


def facts(folder: Path, *overrides: str) -> dict[str, str]:
    config = float32_config(None, [f"model.path={folder}", "data.path=none", *overrides])
    lines = describe(folder, config)
    width = max(len(line.split("  ")[0]) for line in lines)
    return {line[:width].strip(): line[width:].strip() for line in lines}


def test_parameters_are_counted_and_backends_named(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    found = facts(model_folder)
    assert found["parameters"].startswith(f"{sum(p.numel() for p in model.parameters()):,} (F32")
    assert "Qwen3ForCausalLM" in found["architecture"]
    assert found["trainer fsdp2"] == "yes, rows packed"
    assert found["engine embedded"] == "yes"


def test_images_are_read_by_models_with_a_tower_of_a_known_family(tmp_path: Path, model_folder: Path) -> None:
    for family, rows in (("qwen2_5_vl", "packed"), ("gemma3", "padded")):
        save_vision_model(family, tmp_path / family)
        found = facts(tmp_path / family)
        assert found["images"].startswith({"qwen2_5_vl": "16", "gemma3": "8"}[family] + " tokens")
        assert found["positions"] == "512"
        assert rows in found["trainer fsdp2"] and found["trainer megatron"].startswith("no: ")
        assert ("sharing" in found) == (rows == "packed")
    assert "images" not in facts(model_folder)
    config = tmp_path / "gemma3/config.json"
    config.write_text(config.read_text().replace('"model_type": "gemma3"', '"model_type": "paligemma"'))
    found = facts(tmp_path / "gemma3")
    assert "paligemma" in found["images"] and found["trainer fsdp2"].startswith("no: ")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gpt_oss", "yes, rows packed"),
        ("nemotron_h", "yes, rows packed"),
        ("deepseek_v4", "yes, rows padded: models of type deepseek_v4"),
        ("gpt2", "no: model.path: GPT2LMHeadModel"),
        ("qwen3_5", "yes, rows packed"),
    ],
)
def test_the_model_is_built_to_say_what_trains_it(kind: str, said: str, model_folder: Path, tmp_path: Path) -> None:
    config_of(kind).save_pretrained(tmp_path)
    PreTrainedTokenizerFast.from_pretrained(model_folder).save_pretrained(tmp_path)
    found = facts(tmp_path)
    assert found["trainer fsdp2"].startswith(said)
    assert "sharing" not in found
    assert (found["engine embedded"] == "yes") == (kind == "qwen3_5")
    try:
        build_headed(str(tmp_path), "policy")
    except UserError as error:
        assert ("lm_head" in str(error)) == said.startswith("no"), "of the others only the weights are missing"


def test_memory_is_the_dry_runs_estimate(model_folder: Path) -> None:
    config = float32_config(None, [f"model.path={model_folder}", "data.path=none", "rollout.max_batch_size=512"])
    expected = engine_bytes(config, model_size(config))
    assert expected is not None
    found = facts(model_folder, "rollout.max_batch_size=512")
    assert found["memory of an engine"] == f"{expected / 2**30:.2f} GiB"


def test_what_cannot_serve_or_train_a_model_is_said(tmp_path: Path, model_folder: Path) -> None:
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_act="gelu",
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    found = facts(tmp_path)
    assert found["engine embedded"].startswith("no: ") and "'dynamic'" in found["engine embedded"]
    assert found["trainer megatron"].startswith("no: ")
    assert found["trainer fsdp2"].startswith("yes, rows padded")
    assert found["chat format"].startswith("none: ")
    assert "BF16" in found["parameters"]


def test_importing_copies_a_folder_whole_and_records_its_source(tmp_path: Path, model_folder: Path) -> None:
    import_model(str(model_folder), tmp_path / "copy")
    assert facts(tmp_path / "copy")["imported from"] == str(model_folder)
    assert facts(tmp_path / "copy")["parameters"] == facts(model_folder)["parameters"]
    with pytest.raises(UserError, match="copy exists"):
        import_model(str(model_folder), tmp_path / "copy")


def test_importing_copies_neither_pickles_nor_code(tmp_path: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "own")
    for name in ("pytorch_model.bin", "modeling_own.py", ".git/config"):
        (tmp_path / "own" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "own" / name).touch()
    import_model(str(tmp_path / "own"), tmp_path / "copy")
    there = {path.name for path in model_folder.iterdir()} | {SOURCE_FILE}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == there
    next((tmp_path / "own").glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="safetensors"):
        import_model(str(tmp_path / "own"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_without_a_model_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["model", "info", str(tmp_path / "empty")]) == 2
    assert main(["model", "import", str(tmp_path / "empty"), str(tmp_path / "new")]) == 2
    assert main(["model", "import", "nowhere.gguf", str(tmp_path / "new")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert capsys.readouterr().err.count("error: ") == 3
