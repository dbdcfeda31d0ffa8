"""What is missing on disk is found before any process starts, and said with the key that names it."""

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, UserError
from rl_async.launcher.plan import artifacts
from rl_async.launcher.plan.artifacts import SFT_FILE, needs_data, needs_model, needs_preparation, origin_of
from rl_async.launcher.plan.memory import model_size
from tests.support.configs import float32_config


def config(root: Path, *overrides: str) -> RunConfig:
    paths = [
        f"model.path={root}/model",
        f"data.path={root}/train.parquet",
        f"data.eval_path={root}/test.parquet",
        f"warm_start.demos_path={root}/demos.parquet",
        f"warm_start.out={root}/model",
    ]
    return float32_config("calculator", [*paths, *overrides])


def write_data(root: Path) -> None:
    for name in ("train", "test", "demos"):
        (root / f"{name}.parquet").touch()


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def write_model(root: Path, *left_out: str) -> Path:
    folder = root / "model"
    folder.mkdir()
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - set(left_out):
        (folder / name).write_bytes(NO_TENSORS if name.endswith(".safetensors") else b"{}")
    return folder


def test_generated_data_and_warm_start_are_to_be_made(tmp_path: Path) -> None:
    assert needs_preparation(config(tmp_path))
    write_data(tmp_path)
    assert not needs_data(config(tmp_path))
    assert needs_model(config(tmp_path))
    write_model(tmp_path)
    assert not needs_preparation(config(tmp_path))


def test_demonstrations_are_needed_only_for_a_warm_start(tmp_path: Path) -> None:
    write_data(tmp_path)
    (tmp_path / "demos.parquet").unlink()
    assert needs_data(config(tmp_path))
    write_model(tmp_path)
    assert not needs_data(config(tmp_path))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.eval_path=nowhere.parquet", "data.eval_path: no file nowhere.parquet.*data.eval_path=null"),
        ("warm_start.demos_path=nowhere.parquet", "warm_start.demos_path: no file nowhere.parquet.*warm_start=null"),
        ("data.make=null", "data.path: no file"),
    ],
)
def test_a_file_that_nothing_makes_is_named(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(DataError, match=named):
        needs_preparation(config(tmp_path, override))


def test_generated_sources_are_not_files(tmp_path: Path) -> None:
    assert not needs_data(
        config(tmp_path, "data.make=null", "data.path=reasoning_gym:gcd", "data.eval_path=null", "warm_start=null")
    )


def test_a_missing_model_without_warm_start_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path: no folder"):
        needs_model(config(tmp_path, "warm_start=null"))


def test_a_mistyped_model_is_named_and_no_toy_made_in_its_place(tmp_path: Path) -> None:
    write_data(tmp_path)
    typo = config(tmp_path, f"model.path={tmp_path}/modle")
    with pytest.raises(ConfigError, match=r"model\.path: .*modle.*warm_start\.out"):
        needs_preparation(typo)
    assert model_size(typo) is None
    without = config(tmp_path, "warm_start.out=''")  # as in the config of a run that is older than this key
    with pytest.raises(ConfigError, match=r"model\.path.*warm_start\.out"):
        needs_preparation(without)
    write_model(tmp_path)
    assert not needs_preparation(without)


@pytest.mark.parametrize("key", ["model.path", "algorithm.kl.reference_path"])
def test_a_missing_checkpoint_is_named_with_those_that_exist(tmp_path: Path, key: str) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    there = tmp_path / "runs" / "x" / "checkpoints" / "step-000040"
    there.mkdir(parents=True)
    (there / "state.json").touch()
    with pytest.raises(UserError, match=rf"{key}: .*step-3.*has step-000040"):
        needs_preparation(config(tmp_path, f"{key}={there.parent}/step-3/model", "algorithm.kl.coef=0.1"))


@pytest.mark.parametrize(
    ("left_out", "named"),
    [("config.json", r"no config\.json"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no weights")],
)
def test_a_model_folder_with_a_part_missing_is_a_mistake(tmp_path: Path, left_out: str, named: str) -> None:
    write_model(tmp_path, left_out)
    with pytest.raises(UserError, match=named):
        needs_model(config(tmp_path))


def test_weights_that_are_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "model.safetensors")
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"model\.path: .*safetensors"):
        needs_model(config(tmp_path))


def test_weights_that_are_damaged_or_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    for content in (b"", (1 << 40).to_bytes(8, "little") + b"{}"):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=r"model\.path: .*model\.safetensors"):
            needs_model(config(tmp_path))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    for name in ("../x.safetensors", "model-2.safetensors"):
        (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
        with pytest.raises(UserError, match=rf"model\.path: .*{name}"):
            needs_model(config(tmp_path))


def write_tokenizer(folder: Path, **changed: object) -> None:
    train_tokenizer([[{"role": "user", "content": "ab"}]], 128).save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def test_a_tokenizer_or_template_that_takes_all_memory_is_refused_in_words(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    write_tokenizer(folder)
    needs_model(config(tmp_path))
    longer = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 1000}
    write_tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [longer] * 4})
    with pytest.raises(UserError, match=r"model\.path: .*tokenizer"):
        needs_model(config(tmp_path))
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ 'a' * 9999999999 }}")
    with pytest.raises(UserError, match=r"model\.path: .*template"):
        needs_model(config(tmp_path))


def test_a_fork_that_crashes_says_nothing_about_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process without the threads and the objects of this one decides."""
    folder = write_model(tmp_path)
    write_tokenizer(folder)
    monkeypatch.setattr(artifacts, "try_tokenizer", lambda path: os.kill(os.getpid(), signal.SIGSEGV))
    needs_model(config(tmp_path))
    (folder / "chat_template.jinja").write_text("{{ 'a' * 9999999999 }}")
    with pytest.raises(UserError, match=r"model\.path: .*template"):
        needs_model(config(tmp_path))


def test_a_reference_model_is_looked_at_as_well(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    with pytest.raises(UserError, match=r"algorithm\.kl\.reference_path"):
        needs_preparation(config(tmp_path, "algorithm.kl.coef=0.1", "algorithm.kl.reference_path=nowhere"))


def test_the_runs_own_reward_model_is_looked_at_as_well(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    asked = ("reward.functions=[{name: reward_model}]", f"reward.model.path={tmp_path}/rm")
    with pytest.raises(UserError, match=r"reward\.model\.path: .* is not a folder"):
        needs_preparation(config(tmp_path, *asked))
    assert not needs_preparation(config(tmp_path, *asked, "reward.model.url=http://elsewhere"))
    assert not needs_preparation(config(tmp_path, asked[1]))


def test_keys_of_the_tiny_model_do_not_go_with_a_pretrained_one(tmp_path: Path) -> None:
    pretrained = "warm_start.pretrained={path: OWNER/NAME}"
    with pytest.raises(ConfigError, match=r"warm_start\.gate .*warm_start\.pretrained"):
        config(tmp_path, pretrained)  # the preset has a gate
    write_data(tmp_path)
    assert needs_model(config(tmp_path, pretrained, "warm_start.gate=0.9"))


def test_a_warm_start_cannot_ask_the_runs_own_reward_model(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(tmp_path).rename(tmp_path / "rm")
    with pytest.raises(UserError, match=r"model\.path: .*`rl-async sft`"):
        needs_preparation(
            config(tmp_path, "reward.functions=[{name: reward_model}]", f"reward.model.path={tmp_path}/rm")
        )


def test_a_model_of_other_warm_start_settings_is_not_taken(tmp_path: Path) -> None:
    here = config(tmp_path)
    assert here.warm_start is not None
    record = write_model(tmp_path) / SFT_FILE
    demos = Path(here.warm_start.demos_path)
    demos.write_bytes(b"one demonstration")
    record.write_bytes(msgspec.json.encode(origin_of(here.warm_start)))
    assert not needs_model(here)
    demos.write_bytes(b"another one")
    with pytest.raises(UserError, match=r"warm_start\.demos_path"):
        needs_model(here)
    before = {"fingerprint": origin_of(here.warm_start).fingerprint, "steps": 200}
    record.write_text(json.dumps(before))
    assert not needs_model(here), "an earlier version recorded no demonstrations"
    with pytest.raises(UserError, match="warm_start"):
        needs_model(config(tmp_path, "warm_start.seed=5"))
    elsewhere = (tmp_path / "model").rename(tmp_path / "moved")
    assert not needs_model(config(tmp_path, f"model.path={elsewhere}", f"warm_start.out={elsewhere}"))
    elsewhere.rename(tmp_path / "model")
    record.write_text("torn")
    with pytest.raises(UserError, match=r"model\.path: .*sft\.json"):
        needs_model(here)


def test_a_critic_starts_from_a_model_folder_or_a_saved_critic(tmp_path: Path) -> None:
    write_data(tmp_path)
    model = write_model(tmp_path)
    saved = tmp_path / "checkpoints" / "critic"
    saved.mkdir(parents=True)
    (saved / "model").symlink_to(model)
    gae = ("algorithm.advantage=gae", "critic={}")
    for path in (model, saved):
        needs_preparation(config(tmp_path, *gae, f"critic.path={path}"))
    with pytest.raises(UserError, match=r"critic\.path: .*checkpoints has no config\.json"):
        needs_preparation(config(tmp_path, *gae, f"critic.path={saved.parent}"))
