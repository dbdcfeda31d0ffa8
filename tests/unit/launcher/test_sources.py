"""Models and data sets from the Hub, ModelScope, packages and GGUF files."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl_async.configs.load import load_config
from rl_async.configs.schema.data import OverrideConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, UserError
from rl_async.launcher import sources
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.model_info import describe
from rl_async.launcher.plan.memory import engine_bytes, model_size
from rl_async.launcher.run_folder import SOURCES, create, note_sources, resumed_run
from rl_async.launcher.sources import (
    SOURCE_FILE,
    HubId,
    Kind,
    convert,
    data_files,
    fetch_sources,
    fetched_from,
    hub_id,
    import_model,
    kept_sources,
    model_folder,
    overridden_folder,
    overridden_shape,
)
from rl_async.trainer.model import build_headed
from tests.support.configs import float32_config
from tests.support.families import config_of
from tests.support.tiny_models import TEMPLATE, save_vision_model, write_gguf

COMMIT, LATER = "a" * 40, "b" * 40


class FakeHub:
    """Has one data set and any model; notes what was asked for."""

    def __init__(self, root: Path, *files: str, commit: str = COMMIT) -> None:
        self.root, self.files, self.commit = root, files, commit
        self.asked: list[tuple[Kind, HubId, str]] = []

    def __call__(self, kind: Kind, wanted: HubId, key: str) -> Path:
        self.asked.append((kind, wanted, key))
        commit = wanted.revision or self.commit
        folder = self.root / f"{kind}s--{wanted.repo.replace('/', '--')}" / "snapshots" / commit
        for name in self.files if kind == "dataset" else ("config.json",):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}" if name == "config.json" else "")
        return folder


def config(*overrides: str) -> RunConfig:
    own = ["warm_start=null", "data.make=null", "data.eval_path=null"]
    return load_config("calculator", [*own, *overrides])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubId("Qwen/Qwen3-0.6B", "v1.0")),
        ("openai/gsm8k:main/train", HubId("openai/gsm8k", None, "main/train")),
        ("openai/gsm8k@abc:test", HubId("openai/gsm8k", "abc", "test")),
        ("modelscope:org/tasks@v1:test", HubId("org/tasks", "v1", "test", modelscope=True)),
        ("data/train.parquet", None),
        ("artifacts/calculator/model", None),
        ("/models/mine", None),
        ("../models", None),
        ("mine", None),
    ],
)
def test_ids_are_told_from_paths(text: str, expected: HubId | None) -> None:
    assert hub_id(text) == expected


def test_ids_become_folders_and_paths_stay(tmp_path: Path) -> None:
    hub = FakeHub(
        tmp_path, "main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet", "main/test.parquet"
    )
    given = config("model.path=org/model@v1", "data.path=org/tasks", "data.eval_path=org/tasks:main/test")
    fetched = fetch_sources(given, hub)
    tasks = tmp_path / "datasets--org--tasks" / "snapshots" / COMMIT
    assert fetched.model.path == str(tmp_path / "models--org--model" / "snapshots" / "v1")
    assert (fetched.data.path, fetched.data.eval_path) == (
        f"{tasks}/main/train-*.parquet",
        f"{tasks}/main/test.parquet",
    )
    assert [key for _, _, key in hub.asked] == ["model.path", "data.path", "data.eval_path"]
    assert fetch_sources(fetched, FakeHub(tmp_path)) == fetched


def test_what_a_preset_makes_is_not_looked_for() -> None:
    given = load_config("calculator", ["model.path=made/here", "warm_start.out=made/here", "data.path=made/data"])
    assert fetch_sources(given, FakeHub(Path("nowhere"))) == given


@pytest.mark.parametrize(
    ("files", "named"),
    [((), "no Parquet, JSONL or CSV"), (("a/train.jsonl", "b/train.jsonl"), r"a/train\.jsonl, b/train")],
)
def test_a_split_that_is_missing_or_not_the_only_one_is_named(
    tmp_path: Path, files: tuple[str, ...], named: str
) -> None:
    hub = FakeHub(tmp_path, "README.parquet", *files)
    with pytest.raises(DataError, match=rf"data\.path: .*{named}"):
        data_files("org/tasks", "data.path", hub)


def test_a_run_keeps_its_commit_and_fetches_it_again_if_the_cache_was_emptied(tmp_path: Path) -> None:
    overrides = [
        *("warm_start=null", "data.make=null", "data.eval_path=null", f"launcher.run_dir={tmp_path}/runs"),
        *("model.path=org/model", "data.path=org/tasks"),
    ]
    cache = tmp_path / "cache"
    given = load_config("calculator", overrides)
    started = fetch_sources(given, FakeHub(cache, "train.jsonl"))
    folder = tmp_path / "runs" / "mine"
    create(started, folder)
    note_sources(folder, fetched_from(given, started))
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001" / "state.json").touch()
    resumed, _ = resumed_run("calculator", overrides, name="mine")
    newer = FakeHub(cache, "train.jsonl", commit=LATER)
    assert fetch_sources(resumed, newer).model.path == started.model.path
    assert fetch_sources(resumed, newer).data.path == started.data.path
    assert newer.asked == []
    (Path(started.model.path) / "config.json").unlink()
    Path(started.model.path).rmdir()
    assert fetch_sources(resumed, newer).model.path == started.model.path
    assert newer.asked == [("model", HubId("org/model", COMMIT), "model.path")]


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.path=org/tasks:main/train", "data.eval_path=org/tasks:main/test"],
        ["data.path=[{path: 'org/tasks:main/train'}, {path: 'org/tasks:main/test'}]", "data.eval_path=org/tasks"],
        ["data.path=org/tasks", "data.eval_path=[{path: 'org/tasks:test'}, {path: 'org/tasks:train'}]"],
        [
            "model.path=org/model",
            f"algorithm.kl.reference_path=org/model@{LATER}",
            *("critic.path=org/model", "algorithm.advantage=gae", "algorithm.kl.coef=0.1"),
        ],
    ],
)
def test_each_key_of_a_resumed_run_keeps_its_own_source(tmp_path: Path, overrides: list[str]) -> None:
    given = config(*overrides)
    started = fetch_sources(given, FakeHub(tmp_path, "main/train.parquet", "main/test.parquet"))
    assert started != given
    assert kept_sources(given, started, fetched_from(given, started)) == started


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ("model.path=org/model@v2", "model.path"),
        ("model.path=org/model@v1", "model.path"),
        ("data.path=org/tasks:test", "trains on"),
        ("data.path=org/tasks@v1", "trains on"),
    ],
)
def test_a_run_is_not_resumed_with_another_revision_or_split(tmp_path: Path, other: str, key: str) -> None:
    overrides = [
        *("warm_start=null", "data.make=null", "data.eval_path=null", f"launcher.run_dir={tmp_path}"),
        *("model.path=org/model", "data.path=org/tasks"),
    ]
    given = load_config("calculator", overrides)
    started = fetch_sources(given, FakeHub(tmp_path / "cache", "train.jsonl", "test.jsonl"))
    create(started, tmp_path / "mine")
    note_sources(tmp_path / "mine", fetched_from(given, started))
    (tmp_path / "mine" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "mine" / "checkpoints" / "step-000001" / "state.json").touch()
    assert resumed_run("calculator", overrides, name="mine")[0] == msgspec.structs.replace(started, name="")
    with pytest.raises(UserError, match=key):
        resumed_run("calculator", [*overrides, other], name="mine")


def test_what_later_commands_fetch_is_added_to_what_the_run_fetched(tmp_path: Path) -> None:
    note_sources(tmp_path, {"data.path": {"org/a": "/a"}})
    note_sources(tmp_path, {"data.path": {"org/b": "/b"}, "model.path": {"org/m": "/m"}})
    note_sources(tmp_path, {})
    record = json.loads((tmp_path / SOURCES).read_text())
    assert record == {"data.path": {"org/a": "/a", "org/b": "/b"}, "model.path": {"org/m": "/m"}}


@pytest.mark.parametrize(("source", "other"), [("org/tasks:test", "latest"), ("org/tasks", "untrained")])
def test_a_split_is_a_word_of_the_name(tmp_path: Path, source: str, other: str) -> None:
    with pytest.raises(DataError, match=r"data\.path"):
        data_files(source, "data.path", FakeHub(tmp_path, f"{other}.parquet"))
    files = FakeHub(tmp_path, f"{other}.parquet", "main/train_1.parquet", "main/test-0.parquet")
    assert Path(data_files(source, "data.path", files)).parent.name == "main"


def test_shards_may_have_checksums_in_their_names(tmp_path: Path) -> None:
    names = [f"train-0000{n}-of-00002-0123456789abcde{n}.parquet" for n in range(2)]
    files = FakeHub(tmp_path, *names, "test-00000-of-00001-0123456789abcdef.parquet")
    assert Path(data_files("org/tasks", "data.path", files)).name == "train-*.parquet"
    assert Path(data_files("org/tasks:test", "data.path", files)).name.endswith("cdef.parquet")


def test_a_set_of_shards_is_whole(tmp_path: Path) -> None:
    first, second = (f"train-0000{n}-of-00002.parquet" for n in range(2))
    with pytest.raises(DataError, match=r"data\.path"):
        data_files("org/tasks", "data.path", FakeHub(tmp_path, first))
    whole = FakeHub(tmp_path, first, second)
    pattern = data_files("org/tasks", "data.path", whole)
    next(tmp_path.rglob(second)).unlink()
    assert data_files(pattern, "data.path", whole) == pattern
    assert [wanted.revision for _, wanted, _ in whole.asked] == [None, COMMIT]
    hub = FakeHub(tmp_path, first)
    next(tmp_path.rglob(second)).unlink()
    assert data_files(pattern.replace("train-*.parquet", first), "data.path", hub).endswith(first), "one is meant"
    assert hub.asked == []
    with pytest.raises(DataError, match=r"data\.path"):
        data_files(pattern, "data.path", hub)
    both = FakeHub(tmp_path, first, second, "test-00000-of-00001.parquet")
    assert data_files("org/tasks", "data.path", both) == pattern
    every = pattern.replace("train-*", "*")
    assert data_files(every, "data.path", both) == every and len(both.asked) == 1


def test_a_path_that_is_neither_is_left_to_the_checks_of_folders() -> None:
    assert model_folder("typo", "model.path") == Path("typo")


def test_shards_of_two_versions_are_not_one_data_set(tmp_path: Path) -> None:
    old, new = "train-00000-of-00001.jsonl", [f"train-0000{n}-of-00002.jsonl" for n in range(2)]
    with pytest.raises(DataError, match=r"data\.path: .*1, 2"):
        data_files("org/tasks", "data.path", FakeHub(tmp_path, old, *new))
    with pytest.raises(DataError, match=r"data\.path: .*1, 2"):
        data_files("org/tasks:of-00002", "data.path", FakeHub(tmp_path, old, *new))
    pattern = str(next(tmp_path.rglob(old)).parent / "train-*.jsonl")
    with pytest.raises(DataError, match=r"data\.path: .*1, 2"):
        data_files(pattern, "data.path", FakeHub(tmp_path, old, *new))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("package", ["transformers", "gguf", "rl-async"])
def test_a_gguf_file_is_converted_again_by_another_version(tmp_path: Path, cache: Path, package: str) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    here = sources.folder_of(file)
    metadata = tmp_path / "other" / f"{package.replace('-', '_')}-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.1\n")

    sys.path.insert(0, str(tmp_path / "other"))
    try:
        other = sources.folder_of(file)
    finally:
        sys.path.remove(str(tmp_path / "other"))

    assert sources.folder_of(file) == here != other


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


def test_a_folder_that_python_could_import_is_not_offered_as_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_model_elsewhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert model_folder("a_model_elsewhere", "model.path") == Path("a_model_elsewhere")


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


# What is said of a model folder agrees with what the trainer and the engines check when they load it.


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
