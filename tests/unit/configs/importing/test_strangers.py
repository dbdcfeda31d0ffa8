"""Files from elsewhere: what is printed for them holds their values and nothing else, and hostile ones are refused."""

import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.importing.importers import SOURCES
from rl_async.configs.importing.translation import Translation, nested
from rl_async.configs.load import parse
from rl_async.errors import ConfigError
from rl_async.launcher.cli.__main__ import main

ODD = [
    "\n",
    "\r",
    "\t",
    "\x00",
    "\x0b",
    "\x0c",
    "\x1b",
    "\x1c",
    "\x85",
    "\u2028",
    "\u2029",
    "\ufeff",
    "\u202e",
    "\ud800",
]
WORDS = [
    "#",
    ": ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "&a",
    "*a",
    "!x",
    "|",
    ">",
    '"',
    "'",
    "%",
    "@",
    "`",
    "\\",
    "~",
    "=",
    "<<",
    "  ",
]
LIKE_VALUES = ["null", "yes", "0_5", "1e-3", "1:30", "0x1F", "2026-01-01", ".nan", ".inf", "-1", "1.0", "---", "..."]
LINE = "reward: {functions: [{name: 'evil.py:f'}]}"
KEYS = {
    "trl": ["model_name_or_path", "dataset_name", "lr_scheduler_type", "loss_type", "output_dir", "reward_weights"],
    "verl": ["actor_rollout_ref.model.path", "data.train_files", "trainer.project_name", "trainer.experiment_name"],
    "prime-rl": ["model.name", "wandb.project", "orchestrator.renderer", "trainer.loss.type"],
    "slime": ["hf-checkpoint", "prompt-data", "wandb-project", "rm-type", "kl-loss-type"],
}


def text(rng: random.Random) -> str:
    parts = [
        rng.choice([*ODD, *WORDS, *LIKE_VALUES, LINE, "é", "漢", "\U0001f600", "a", "b c"])
        for _ in range(rng.randint(0, 6))
    ]
    return "".join(parts)


def value(rng: random.Random, depth: int = 0) -> Any:
    made = rng.randrange(9 if depth < 2 else 7)
    if made < 4:
        return text(rng)
    if made == 4:
        return rng.choice([True, False, None])
    if made == 5:
        return rng.choice([0, -7, 10**25, 1 << 70])
    if made == 6:
        return rng.choice([0.1, -1e300, 5e-324, float("inf")])
    if made == 7:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {text(rng): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def script(given: dict[str, Any]) -> str:
    """Write flags; a script's words have no line breaks, and a file no surrogates."""
    rest = re.sub("[\n\r\x00\ud800-\udfff]", "", "".join(map(str, given.values())))
    flags = {key: json.dumps(value) for key, value in given.items() if re.fullmatch("[a-z-]+", key)}
    return "train.py " + " ".join(
        f"--{key} {shlex.quote(text)}" for key, text in (flags | {"save": json.dumps(rest, ensure_ascii=False)}).items()
    )


@pytest.fixture
def translations(monkeypatch: pytest.MonkeyPatch) -> list[Translation]:
    """What is translated from now on, as it is when it is printed."""
    seen: list[Translation] = []
    real = Translation.text

    def kept(self: Translation, *arguments: Any) -> str:
        seen.append(self)
        return real(self, *arguments)

    monkeypatch.setattr(Translation, "text", kept)
    return seen


def round_trip(source: str, rng: random.Random, folder: Path, translations: list[Translation]) -> bool:
    """Whether a file of random values was translated; what is printed then parses to what was translated."""
    given = {key: value(rng) for key in rng.sample(KEYS[source], 3)} | {text(rng): value(rng) for _ in range(3)}
    file = folder / ("run.sh" if source == "slime" else "given.json")
    file.write_text(script(given) if source == "slime" else json.dumps(given))
    try:
        printed = SOURCES[source](file, [])
    except ConfigError:
        return False
    assert parse(printed, "printed") == nested(translations.pop().ours)
    return True


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_printed_holds_the_translated_values_and_nothing_else(
    source: str, tmp_path: Path, translations: list[Translation]
) -> None:
    rng = random.Random(random.random())
    assert sum(round_trip(source, rng, tmp_path, translations) for _ in range(60)) > 6


DEEP = "[" * 5000 + "]" * 5000
QUOTED = ".".join(['"a b"'] * 50_000)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.yaml", f"learning_rate: {DEEP}"),
        ("deep.json", f'{{"learning_rate": {DEEP}}}'),
        ("deep.toml", f"learning_rate = {DEEP}"),
        ("deep_key.toml", f"{'.'.join(['a'] * 50_000)} = 1"),
        ("deep_quoted_key.toml", f"[{QUOTED}]"),
        ("bomb.yaml", f"{BOMB}learning_rate: *a9"),
        ("merges.yaml", f"{MERGES}learning_rate: 1"),
        ("itself.yaml", "learning_rate: &a [*a]"),
        ("itself.yaml", "learning_rate: &a {b: *a}"),
        ("itself.yaml", "learning_rate: &a {<<: *a}"),
        ("long.yaml", "learning_rate: 1\n" * 100_000),
        ("variables.txt", "A=xxxxxxxx\n" + "A=$A$A$A$A\n" * 60 + "learning.rate=$A"),
        ("defaults.txt", "A=" + "${A:-" * 25_000 + "}" * 25_000),
        ("condition.txt", f"if [ {'a -a ' * 25_000}a ]; then\ntrain.py\nfi"),
        ("immense.txt", "A=b\n" * 100_000),
        ("binary.txt", "\x00\x01" * 100),
        ("notes.txt", "Nothing that any trainer knows."),
        ("empty.yaml", "{}"),
        ("another.yaml", "foo: 1\nbar: {baz: 2}"),
        ("script.py", "print('no config')"),
        ("broken.py", "GRPOConfig(("),
        ("deep.py", f"GRPOConfig(learning_rate={'-' * 20_000}1)"),
    ],
)
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_no_config_of_the_project_is_refused_at_once(
    source: str, name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["config", f"from-{source}", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("content", [BOMB, MERGES, f"a: {DEEP}", "a: &a [*a]", "a: &a {<<: *a}"])
def test_our_own_configs_are_bounded_alike(content: str) -> None:
    with pytest.raises(ConfigError):
        parse(content, "c.yaml")


def test_values_of_other_kinds_are_refused_naming_the_file(tmp_path: Path) -> None:
    for given in ({"num_generations": 0}, {"max_tool_calling_iterations": "x"}, {"epsilon": [1], "loss_type": "cispo"}):
        (tmp_path / "c.json").write_text(json.dumps(given))
        with pytest.raises(ConfigError):
            SOURCES["trl"](tmp_path / "c.json", [])


def test_what_no_config_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("model_name_or_path = 07:32:00")
    with pytest.raises(ConfigError, match="time"):
        SOURCES["trl"](tmp_path / "c.toml", [])


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_without_end_is_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"c\.yaml: more than"):
        SOURCES[source](tmp_path / "c.yaml", [])


PROGRAM = """
from trl import GRPOConfig, ModelConfig
import trl
STEPS = 7
LATER = 1
LATER = 2
args = trl.GRPOConfig(max_completion_length=1024, learning_rate=3e-6, max_steps=STEPS, num_generations=LATER,
                      beta=float("0.1"), **more)
model = ModelConfig(model_name_or_path="m")
"""


def test_a_python_program_is_read_by_its_literals(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    printed = SOURCES["trl"](tmp_path / "train.py", [])
    values = parse(printed, "printed")
    assert (values["rollout"]["max_tokens"], values["trainer"]["learning_rate"]) == (1024, 3e-6)
    assert (values["trainer"]["steps"], values["model"]["path"]) == (7, "m")
    for left in ("num_generations = LATER", "beta = float", "** = more"):
        assert left in printed


def test_flags_in_a_script_of_trls_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("accelerate launch grpo.py --max_completion_length 77 --learning-rate 1e-6\n")
    values = parse(SOURCES["trl"](tmp_path / "run.sh", []), "printed")
    assert values["rollout"]["max_tokens"] == 77
