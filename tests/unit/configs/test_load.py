"""Every mistake in a config is answered with where it stands and what would be right."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from rl_async.configs.derived import resolve_transport
from rl_async.configs.load import (
    all_keys,
    describe,
    dump,
    explain,
    field_names,
    key_text,
    leaves,
    load_config,
    load_resolved,
    preset_names,
    struct_at,
)
from rl_async.configs.schema.algorithm import PRESETS, Correction
from rl_async.configs.suggestions import ABSENT, DROPPED, MOVED
from rl_async.errors import ConfigError
from rl_async.extraction import extract

MINIMAL = "model:\n  path: m\ndata:\n  path: d.parquet\n"


@pytest.fixture
def write(tmp_path: Path):
    def write_config(text: str) -> str:
        path = tmp_path / "my.yaml"
        path.write_text(text)
        return str(path)

    return write_config


@pytest.mark.parametrize("name", preset_names())
def test_presets_parse_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    for mode in ("colocated", "disaggregated"):
        config = load_config(name, mode=mode, name="x")
        (tmp_path / "config.yaml").write_text(dump(config))
        assert load_resolved(tmp_path / "config.yaml") == config


def test_the_example_has_room_for_agent_programs() -> None:
    config = load_config("examples/agent_programs.yaml", mode="disaggregated", name="x")
    assert config.agent.gateway is not None and config.agent.gateway.unsupported == "ignore"
    assert config.agent.max_tokens == config.rollout.max_model_len == config.trainer.max_tokens_per_microbatch
    assert config.rollout.max_tokens >= 4096


def test_the_example_of_mcp_servers_starts_two() -> None:
    config = load_config("examples/mcp_shop.yaml", mode="disaggregated", name="x")
    assert [server.name for server in config.agent.mcp] == ["sqlite", "calculator"] and not config.agent.tools


@pytest.mark.parametrize("game", ["relay", "recipes/self_play/config"])
def test_the_example_of_a_game_trains_on_its_own_rewards(game: str) -> None:
    config = load_config(f"examples/{game}.yaml", mode="disaggregated", name="x")
    assert config.agent.environment and not config.agent.tools and not config.agent.opponents
    assert [term.name for term in config.reward.functions] == ["environment"]


def test_the_shipped_presets_are_these() -> None:
    shipped = {"calculator", "calculator-sync", "calculator-async", "calculator-gae", "calculator-moe", "shop", "sort"}
    assert shipped <= set(preset_names())
    staleness = {n: load_config(n).queue.max_staleness for n in ("calculator-sync", "calculator", "calculator-async")}
    assert staleness == {"calculator-sync": 0, "calculator": 1, "calculator-async": 4}


@pytest.mark.parametrize(
    ("turn", "found"),
    [("4900", "4900"), (" 4900\n", "4900"), ('<tool_call>\n{"name":"4900"}\n</tool_call>', None), ("4900}", None)],
)
def test_with_tools_a_further_call_that_has_the_number_is_no_answer(turn: str, found: str | None) -> None:
    [scorer] = load_config("smollm2-tools").reward.functions
    assert extract(turn, scorer.extract) == found


def test_overrides_are_yaml_values_in_order() -> None:
    config = load_config(
        "calculator",
        [
            "trainer.learning_rate=1e-4",
            "trainer.steps=3",
            "trainer.steps=4",
            "agent.tools=[a.py:f, calculator]",
            "warm_start=null",
        ],
    )
    assert config.trainer.learning_rate == 1e-4
    assert config.trainer.steps == 4
    assert config.agent.tools == ("a.py:f", "calculator")
    assert config.warm_start is None


def test_text_that_begins_like_a_number_is_text(tmp_path: Path) -> None:
    config = load_config("calculator", ["data.path=2e3/train.parquet"], name="12e45ab")
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load_resolved(tmp_path / "config.yaml") == config
    assert (config.data.path, config.name) == ("2e3/train.parquet", "12e45ab")


def test_the_home_directory_is_filled_in_as_a_shell_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    sources = ["data.path=[{path: ~/a.jsonl, prompt: 'of ~/b'}]", "data.make=null"]
    config = load_config("calculator", [*sources, "launcher.run_dir=~/runs", "reward.functions=[{name: ~/r.py:score}]"])
    assert config.data.path[0].path == "/home/me/a.jsonl" and config.data.path[0].prompt == "of ~/b"
    assert (config.launcher.run_dir, config.reward.functions[0].name) == ("/home/me/runs", "/home/me/r.py:score")


def test_an_override_may_fill_a_section_that_is_missing(write) -> None:
    config = load_config(write(MINIMAL), ["warm_start.demos_path=demos.parquet", "queue.max_staleness=2"])
    assert config.warm_start is not None and config.warm_start.demos_path == "demos.parquet"
    assert config.queue.max_staleness == 2


def test_mode_and_name_come_from_the_command_line() -> None:
    config = load_config("calculator-sync", mode="colocated", name="mine")
    assert (config.mode, config.name) == ("colocated", "mine")
    assert resolve_transport(config) == "ipc"
    assert resolve_transport(load_config("calculator")) == "nearest"
    mixed = load_config("calculator", ["rollout.engines=2", "rollout.engine=[vllm, sglang]"])
    assert resolve_transport(mixed) == "gloo", "SGLang cannot open our memory"


def test_extends_changes_a_preset(write) -> None:
    config = load_config(write("extends: calculator\ntrainer:\n  steps: 7\n"))
    assert config.trainer.steps == 7
    assert config.trainer.learning_rate == load_config("calculator").trainer.learning_rate


def test_a_file_may_extend_a_preset_of_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("calculator.yaml").write_text("extends: calculator\ntrainer:\n  steps: 7\n")
    assert load_config("calculator.yaml").trainer.steps == 7


@pytest.mark.parametrize("second", ["a.yaml", "b.yaml"])
def test_extending_in_a_circle_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("extends: b.yaml\n")
    Path("b.yaml").write_text(f"extends: {second}\n")
    with pytest.raises(ConfigError, match=rf"b\.yaml: extends: a\.yaml -> b\.yaml -> {second}"):
        load_config("a.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + "trainer:\n  learnin_rate: 1\n", ["my.yaml:6", "did you mean trainer.learning_rate?"]),
        (MINIMAL + "traner:\n  steps: 1\n", ["my.yaml:5", "did you mean trainer?"]),
        (MINIMAL + "trainer:\n  steps: many\n", ["my.yaml:6", "trainer.steps", "expected `int`"]),
        (MINIMAL + "trainer:\n  steps: 0\n", ["my.yaml:6", "trainer.steps", ">= 1"]),
        (MINIMAL + "trainer: 3\n", ["my.yaml:5", "trainer"]),
        (MINIMAL + "rollout:\n  engine: vlm\n", ["my.yaml:6", "rollout.engine"]),
        ("model:\n  path: m\n", ["data"]),
        (MINIMAL + "seed: 1\ntrainer: {}\nseed: 2\n", ["my.yaml:7", "seed stands on line 5"]),
        ("model: {path: m}\ndata:\n  path:\n  - {path: a, path: b}\n", ["my.yaml:4", "path"]),
        ("- 1\n", ["my.yaml", "expected sections"]),
        ("model: [\n", ["my.yaml:2:1: ", "bracket"]),
        (MINIMAL + "trainer:\n\tsteps: 1\n", ["my.yaml:6:1: ", "tabs"]),
        (MINIMAL + "trainer:\n  steps 1\n  minibatches: 1\n", ["my.yaml:7:14: ", "line before"]),
        (MINIMAL + "trainer:\n  steps: 1\n minibatches: 1\n", ["my.yaml:7:2: ", "alike"]),
        (MINIMAL + "name: 'mine\n", ["my.yaml:6:1: ", "begins on line 5", "quotes"]),
        (MINIMAL + "name: @mine\n", ["my.yaml:5:7: ", "quotes"]),
        (MINIMAL + "name: *mine\n", ["my.yaml:5:7: ", "quotes"]),
        (MINIMAL + "name: !mine x\n", ["my.yaml:5:7: ", "quotes"]),
        (MINIMAL + "name: *.jsonl\n", ["my.yaml:5:8: ", "quotes"]),
        (MINIMAL + "name: &a mine\nseed: &a 1\n", ["my.yaml:6:7: ", "anchor 'a'", "line 5"]),
        (MINIMAL + "name: {{mine}}\n", ["my.yaml:5:8: ", "quotes"]),
        (MINIMAL + "name: 2026-13-01\n", ["my.yaml:5:7: ", "2026-13-01", "quotes"]),
        (MINIMAL + "name: \x01\n", ["my.yaml:5:7: ", "U+0001", "escape"]),
        (MINIMAL + 'name: "\\q"\n', ["my.yaml:5:9: ", "single quotes"]),
        (MINIMAL + "agent:\n  tools: [a\n  loop: b\n", ["my.yaml:7:7: ", "begins on line 6", "comma"]),
        (MINIMAL + "agent:\n  tools:\n  - a\n  -b\n", ["my.yaml:9:1: ", "- ITEM"]),
        (MINIMAL + "---\nname: mine\n", ["my.yaml:5:1: ", "---"]),
        ("", ["my.yaml", "expected sections"]),
    ],
)
def test_mistakes_in_a_file_name_the_line(write, text: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(text))
    for part in expected:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.stepz=3", "did you mean trainer.steps?"),
        ("trainr.steps=3", "did you mean trainer?"),
        ("trainer.steps.x=3", "trainer.steps is a single value"),
        ("trainer.steps=abc", "expected `int`"),
        ("trainer.steps=1.5", "expected `int`"),
        ("trainer.steps", "written a.b=c"),
        ("=3", "written a.b=c"),
        ("agent.tools=[", "not valid YAML"),
        ("model.path=\x01", "not valid YAML"),
        ("model.path=2026-13-01", "not valid YAML"),
        ("model.path={{x}}", "not valid YAML"),
        ("queue.sampling=freshst", "did you mean freshest?"),
        ("model.device=cuda", "known: auto, cpu, gpu"),
        ("queue.sampling=7", "queue.sampling"),
        ("queue.sampling=xyz", "known: fifo, freshest, priority, quota"),
        ("tracking.backends=[consol]", "tracking.backends"),
        (
            "reward.functions=mine.py:score",
            "(reward.functions: list of {name, weight, extract, text}, as in [{name: path.py:function}])",
        ),
        (
            "reward.functions=[mine.py:score]",
            "(reward.functions: list of {name, weight, extract, text}, as in [{name: path.py:function}])",
        ),
    ],
)
def test_mistakes_in_an_argument_name_the_argument(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("calculator", [override])
    assert expected in str(caught.value)
    assert repr(override) in str(caught.value)


@pytest.mark.parametrize(("old", "new"), sorted((MOVED | ABSENT).items()))
def test_an_old_key_is_answered_with_what_it_became(old: str, new: str) -> None:
    assert old not in all_keys() and (old in ABSENT or new.partition(" ")[0] in all_keys())
    with pytest.raises(ConfigError, match=re.escape(old) + ".*" + re.escape(new)):
        load_config("calculator", [f"{old}=null"])
    with pytest.raises(ConfigError, match=re.escape(old) + ".*" + re.escape(new)):
        explain(old)


def test_keys_of_a_renamed_section_are_answered_too(write) -> None:
    for config in (["sft.steps=3"], ["sft=null"]):
        with pytest.raises(ConfigError, match="warm_start"):
            load_config("calculator", config)
    with pytest.raises(ConfigError, match=r"my\.yaml:5.*warm_start"):
        load_config(write(MINIMAL + "sft:\n  steps: 3\n"))


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean calculator\?"):
        load_config("calculater")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        load_config(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_resolved(tmp_path / "config.yaml")


def test_a_run_folder_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its complete config has keys that were removed since; whoever gives one is told so."""
    adaptive = {"target": 0.02, "horizon": 999}
    config = load_config("calculator", ["algorithm.kl.coef=0.1", f"algorithm.kl.adaptive={adaptive}"])
    path = tmp_path / "config.yaml"
    values = yaml.safe_load(dump(config))
    del values["algorithm"]["kl"]["adaptive"]
    values["algorithm"]["kl"] |= adaptive | {"controller": "adaptive"}
    values["queue"] |= {"journal_folder": "", "sqlite_synchronous": "normal"}
    values["algorithm"]["shaping"] |= {"overlong_max_tokens": None, "overlong_cache_tokens": 9, "overlong_factor": 1.0}
    for key, value in DROPPED.items():
        *sections, leaf = key.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value
    values["algorithm"]["loss_options"] |= {"m2po": 0.1}
    values["weight_sync"] |= {"adapters": False, "transport": "auto", "staged": False, "delta": False, "waves": 1}
    values["trainer"]["compile"] = False
    path.write_text(yaml.safe_dump(values))
    assert load_resolved(path) == config
    kept = tmp_path / "kept" / "config.yaml"
    kept.parent.mkdir()
    kept.write_text(yaml.safe_dump(values | {"name": "kept"}))
    assert load_config(str(kept)) == msgspec.structs.replace(config, name="kept")
    ways = {"transport": "disk", "staged": True, "delta": True, "waves": 3}
    several = {"weight_sync": values["weight_sync"] | ways, "rollout": values["rollout"] | {"engines": 2}}
    path.write_text(yaml.safe_dump(values | several))
    assert load_resolved(path).weight_sync.way == ("disk", "staged", "delta", "waves")
    path.write_text(yaml.safe_dump(values | {"trainer": values["trainer"] | {"compile": True}}))
    assert load_resolved(path).trainer == msgspec.structs.replace(config.trainer, kernels="compile")
    with pytest.raises(ConfigError, match=r"trainer\.attention"):
        load_resolved(path, ["trainer.attention=auto"])
    with pytest.raises(ConfigError, match="|".join(map(re.escape, DROPPED | MOVED))):
        load_config(str(path))


# ``config explain`` knows every key: meaning, type, default.


MOST_KEYS, MOST_SHOWN = 160, 180
RELIED_ON = """
    model.path data.path data.train_batch_groups rollout.engine rollout.group_size rollout.engines
    queue.max_staleness queue.journal trainer.backend trainer.learning_rate trainer.steps trainer.tensor_parallel
    algorithm.advantage algorithm.loss algorithm.correction weight_sync.way tracking.backends seed
"""


def test_the_names_that_users_rely_on_exist() -> None:
    assert set(RELIED_ON.split()) <= set(all_keys())


def test_the_keys_are_few() -> None:
    """Counts those of the sections that every config has; the options of a formula count as one key."""
    options = {f"algorithm.{name}_options" for name in ("advantage", "loss", "correction")}

    def count(section: str) -> int:
        keys = [f"{section}.{name}" if section else name for name in field_names(section)]
        there = [key for key in keys if key_text(key).default != "null" or struct_at(key) is None]
        return sum(1 if key in options or struct_at(key) is None else count(key) for key in there)

    assert count("") <= MOST_KEYS
    assert len(list(leaves(yaml.safe_load(dump(load_config("calculator")))))) <= MOST_SHOWN


def test_every_value_has_a_description() -> None:
    for key in all_keys():
        if struct_at(key) is None:
            assert len(explain(key).splitlines()[1].strip()) > 3, key


def test_a_key_is_explained_with_type_and_default() -> None:
    text = explain("queue.max_staleness")
    assert "one-step-off-policy" in text and "whole number >= 0" in text and "default: 1" in text
    assert "fsdp2 | megatron" in explain("trainer.backend")
    assert "(required)" in explain("model.path")


def test_every_correction_is_explained_with_its_numbers() -> None:
    lines = explain("algorithm.correction").splitlines()
    told = {line.split()[0]: line for line in lines[lines.index("Presets:") + 1 :]}
    assert list(told) == list(PRESETS)
    assert "w = min(R, 2); keeps sequences with R in [0.5, 2]" in told["decoupled_seq_is_rs"]
    assert "bypass; loss reinforce; w = r, 0 outside [0.5, 5]" in told["bypass_pg_token_icepop"]
    assert "mean k3 up to 0.01" in told["decoupled_k3_rs"] and "geometric mean of r" in told["decoupled_geo_rs"]
    aged = Correction(max_age=3, veto=0.001, age_weights=(1, 0.5), reject={"seq_max_k1": 2, "token_k2": 1})
    assert describe(aged) == (
        "decoupled; keeps sequences with every r in [0.5, 2]; keeps tokens with k2 up to 1; "
        "masks sequences with any r < 0.001; masks tokens over 3 steps old; times 1, 0.5, … by age"
    )


def test_a_section_lists_its_keys() -> None:
    text = explain("queue")
    assert all(name in text for name in field_names("queue"))


@pytest.mark.parametrize(("key", "near"), [("queue.max_stalenes", "queue.max_staleness"), ("steps", "trainer.steps")])
def test_an_unknown_key_is_answered_with_near_ones(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        explain(key)
