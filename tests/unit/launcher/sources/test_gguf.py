"""A GGUF file becomes the folder of a model, with the weights and the chat template that it holds."""

import json
from pathlib import Path

import pytest
import torch

from rl_async.errors import ConfigError
from rl_async.launcher.sources import SOURCE_FILE, convert, model_folder
from tests.support.tiny_gguf import TEMPLATE, write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_file_is_converted_once_and_exactly(tmp_path: Path, cache: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="install it with pip install 'rl-async[gguf]'")
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    folder = model_folder(str(file), "model.path")
    assert cache in folder.parents
    assert json.loads((folder / SOURCE_FILE).read_text())["source"] == str(file)
    model = AutoModelForCausalLM.from_pretrained(folder)
    written = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(file).tensors}
    assert torch.equal(model.model.embed_tokens.weight, written["token_embd.weight"])
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, written["blk.1.ffn_down.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert (tokenizer.chat_template, tokenizer.eos_token, tokenizer.model_max_length) == (TEMPLATE, "<|im_end|>", 64)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder(str(file), "model.path") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_a_file_that_is_none_is_named_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"model\.path: .*broken\.gguf"):
        model_folder(str(tmp_path / "broken.gguf"), "model.path")
    assert list((cache / "rl-async" / "models").iterdir()) == []


def test_a_file_that_was_cut_or_damaged_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="install it with pip install 'rl-async[gguf]'")
    write_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    broken = [whole[:size] for size in (0, 3, 8, 12, 24, 30, 100, 1000, len(whole) // 2, len(whole) - 500)]
    broken += [whole[:place] + b"\xff" * 8 + whole[place + 8 :] for place in (0, 4, 8, 16, 24, 60, 200)]
    for n, content in enumerate(broken):
        file = tmp_path / f"broken{n}.gguf"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"model\.path: .*{file.name}"):
            convert(file, tmp_path / "out", "model.path")


@pytest.mark.parametrize(("source", "named"), [("nowhere/x.gguf", "no file"), ("package:no_such_package", "installed")])
def test_what_is_missing_is_named_with_the_key(source: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"critic\.path: .*{named}"):
        model_folder(source, "critic.path")


def test_the_only_gguf_file_of_a_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_async.launcher.sources import gguf_file

    package = tmp_path / "shipped_model_a"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="0 GGUF files"):
        gguf_file("package:shipped_model_a", "model.path")
    (package / "tiny.gguf").touch()
    assert gguf_file("package:shipped_model_a", "model.path") == package / "tiny.gguf"
    with pytest.raises(ConfigError, match="package:shipped_model_a"):
        model_folder("shipped_model_a", "model.path")
