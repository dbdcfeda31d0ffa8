"""The folder of a model with a changed config.json."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.configs.load import load_config
from rl_async.configs.schema.data import OverrideConfig
from rl_async.errors import ConfigError
from rl_async.launcher.model_override import overridden_folder, overridden_shape
from rl_async.launcher.sources import fetch_sources


def override(**values: Any) -> OverrideConfig:
    return msgspec.convert(values, OverrideConfig)


YARN = override(rope={"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5})


def test_both_forms_of_a_config_are_changed_and_read_alike(tmp_path: Path) -> None:
    new = {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    old = {"max_position_embeddings": 128, "rope_scaling": None, "rope_theta": 1e4}
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert overridden_shape(new, YARN) == {
        "max_position_embeddings": 512,
        "rope_parameters": scaled | {"rope_theta": 5e5},
    }
    assert overridden_shape(old, YARN) == {"max_position_embeddings": 512, "rope_scaling": scaled, "rope_theta": 5e5}
    for shape in (new, old):
        once = overridden_shape(shape, YARN)
        assert overridden_shape(once, YARN) == once
    text = {"model_type": "qwen2_5_vl", "text_config": old}
    assert overridden_shape(text, YARN)["text_config"] == overridden_shape(old, YARN)


@pytest.mark.parametrize(
    "shape",
    [
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "max_position_embeddings": 8},
        {"rope_theta": 1e6},
    ],
)
def test_a_rotary_embedding_of_another_form_is_refused(shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model\.override\.rope"):
        overridden_shape(shape, YARN)


def test_the_folder_has_the_models_files_and_stays_the_same(model_folder: Path, tmp_path: Path) -> None:
    folder = overridden_folder(model_folder, YARN, tmp_path)
    assert {file.name for file in folder.iterdir()} == {file.name for file in model_folder.iterdir()}
    assert (folder / "model.safetensors").resolve() == (model_folder / "model.safetensors").resolve()
    assert overridden_folder(model_folder, YARN, tmp_path) == folder
    assert overridden_folder(folder, YARN, tmp_path) == folder
    assert overridden_folder(model_folder, override(rope={"rope_theta": 2.0}), tmp_path) != folder


@pytest.mark.parametrize(
    "values",
    [
        ["model.override.rope={rope_type: yarn}"],
        ["model.override.rope={factor: 2}"],
        ["model.override.rope={rope_type: linear, factor: 2, beta_fast: 1}"],
        ["model.override.rope={rope_type: longrope}"],
        ["model.override.attention=fast"],
        ["model.override={attention: eager}", "trainer.backend=megatron"],
    ],
)
def test_unknown_and_unread_names_are_refused(values: list[str]) -> None:
    with pytest.raises(ConfigError, match="override"):
        load_config("calculator", values)


def test_a_run_gets_the_folder(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = ["warm_start=null", "data.make=null", "data.eval_path=null", "data.path=x.jsonl"]
    rope = "model.override.rope={rope_theta: 500}"
    config = fetch_sources(load_config("calculator", [*own, f"model.path={model_folder}", rope]))
    shape = json.loads((Path(config.model.path) / "config.json").read_text())
    assert math.isclose(shape["rope_parameters"]["rope_theta"], 500)
    assert fetch_sources(config) == config
    with pytest.raises(ConfigError, match=r"model\.override"):
        fetch_sources(load_config("calculator", [rope, f"warm_start.out={tmp_path}/x", f"model.path={tmp_path}/x"]))
