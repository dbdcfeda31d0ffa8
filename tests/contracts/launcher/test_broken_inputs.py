"""Runs that cannot work, and are refused before they start: the key that is to be changed comes first.

This prints each refusal with the seconds that it took:

    pytest -q -rP -m "slow or not slow" tests/contracts/launcher/test_broken_inputs.py | grep refused
"""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.load import load_config
from rl_async.errors import EXIT_USER, ConfigError, DataError, UserError
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.plan.machine import plan_here
from rl_async.launcher.runs.rehearsal import rehearse_here

# Without torch, which the processes of rewards and environments would import, too.
MINE = """
def scalar(x): return -(x.logprobs * x.advantages)[x.mask].mean()
def per_row(x): return -(x.logprobs * x.advantages).sum(1)
def nan(x): return -x.advantages * x.logprobs.log()
def in_place(x): return -x.logprobs * x.advantages.mul_(x.mask)
def on_a_leaf(x): return -x.advantages * x.logprobs.sub_(x.behaviour)
def detached(x): return -x.advantages * x.logprobs.detach()
def unknown_name(x): return x.old_log_probs * 2

def past_the_mask(x): return x.token_rewards.sum(1).where(x.scored, 0.0)[:, None] * x.mask
def no_number(x): return ((x.rewards - x.rewards.mean()) / (x.rewards * 0))[:, None] * x.mask
def in_place_rewards(x): return x.rewards.sub_(0.5).where(x.scored, 0.0)[:, None] * x.mask

def raises(solution_str): raise RuntimeError("boom")
def text(solution_str): return "correct"
def tensor(solution_str): return torch.ones(2)
def nothing(solution_str): return None
def no_such_column(solution_str, extra_info): return extra_info["difficulty"]

def wordless(query: str) -> str: return query

class World:
    def __init__(self, task): self.secret = task.extra["secret"]
"""

ROW = {"prompt": "what is 2 + 3", "reward_model": {"ground_truth": "5"}, "data_source": "x"}
FILES = {
    "rows.jsonl": [ROW] * 3,
    "other_columns.jsonl": [{"question": "what is 2 + 3", "answer": "5"}] * 3,
    "empty.jsonl": [],
    "half.jsonl": [ROW, {"prompt": 7}],
    "long.jsonl": [ROW, ROW | {"prompt": "1 + " * 2000}],
}
# The settings of a run on own rows and an own model, without anything that a preset would make.
OWN = ["data.path=rows.jsonl", "data.make=null", "data.eval_path=null", "eval.every=0", "model.path=model"]
OWN += ["warm_start=null", "agent.tools=[]", "model.dtype=float32"]


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a module, data and three models, and without GPUs or logins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("SWANLAB_API_KEY", "SWANLAB_ROOT", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)
    Path("mine.py").write_text(MINE)
    for name, rows in FILES.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(model_folder, "no_template")
    shutil.copytree(model_folder, "model")
    train_tokenizer([[{"role": "user", "content": ROW["prompt"]}]], 128).save_pretrained("model")
    shutil.copytree("model", "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))


@contextmanager
def refused(kind: type[UserError]) -> Iterator["pytest.ExceptionInfo[UserError]"]:
    """Expect an error of this kind, and print it."""
    began = time.perf_counter()
    with pytest.raises(kind) as caught:
        yield caught
    print(f"refused in {time.perf_counter() - began:.2f} s: {caught.value}")


def refusal_of_dry_run(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Give the whole command, which must fail, and print and return its only line."""
    began = time.perf_counter()
    code = main(["launch", "--mode", "disaggregated", "--config", "calculator", "--dry-run", *OWN, *overrides])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == EXIT_USER
    print(f"refused in {time.perf_counter() - began:.2f} s: {line.removeprefix('error: ')}")
    return line


def test_the_run_that_the_others_break_is_accepted(tmp_path: Path) -> None:
    config = load_config("calculator", OWN)
    labels = [label for label, _ in rehearse_here(config, whole=True).lines]
    assert labels == ["data", "prompt", "answers end", "reward"]
    plan_here(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("algorithm.loss", name) for name in ("scalar", "per_row", "nan", "in_place", "on_a_leaf", "detached")),
        ("algorithm.loss", "unknown_name"),
        *(("algorithm.advantage", name) for name in ("past_the_mask", "no_number", "in_place_rewards")),
        ("reward.functions", "no_such_column"),
        *(
            # Each starts a process of its own.
            pytest.param("reward.functions", name, marks=pytest.mark.slow)
            for name in ("raises", "text", "nothing", "tensor")
        ),
    ],
)
def test_a_broken_function_is_named_behind_its_key(key: str, name: str) -> None:
    value = f"[{{name: mine.py:{name}}}]" if key == "reward.functions" else f"mine.py:{name}"
    with refused(ConfigError) as caught:
        rehearse_here(load_config("calculator", [*OWN, f"{key}={value}"]), whole=True)
    assert str(caught.value).startswith(f"{key}: mine.py:{name}")


@pytest.mark.parametrize(("name", "said"), [("syntax:score", "syntax.py:1: "), ("mine:absent", "mine.py has no ")])
def test_a_file_that_cannot_be_loaded_is_named_behind_its_key(name: str, said: str) -> None:
    Path("syntax.py").write_text("def score(solution_str)\n")
    value = name.replace(":", ".py:")
    with refused(ConfigError) as caught:
        rehearse_here(load_config("calculator", [*OWN, f"reward.functions=[{{name: {value}}}]"]), whole=True)
    assert str(caught.value).startswith(f"reward.functions: {said}")


def test_a_tool_that_says_nothing_of_itself_is_a_warning() -> None:
    own = ["agent.tools=[mine.py:wordless]", "agent.unprinted_tools=allow"]
    (warning,) = rehearse_here(load_config("calculator", [*OWN, *own]), whole=True).warnings
    assert warning.startswith("agent.tools: wordless ")


@pytest.mark.parametrize(
    ("override", "kind", "named"),
    [
        ("model.path=no_template", ConfigError, "model.path: no_template"),
        ("data.path=long.jsonl", DataError, "long.jsonl, row 1"),
        ("data.path=half.jsonl", DataError, "half.jsonl, row 1"),
    ],
)
def test_what_only_a_reading_of_all_rows_or_a_rendered_prompt_shows(
    override: str, kind: type[UserError], named: str
) -> None:
    with refused(kind) as caught:
        rehearse_here(load_config("calculator", [*OWN, override]), whole=True)
    assert str(caught.value).startswith(named)


def test_demonstrations_without_conversations_are_named() -> None:
    pq.write_table(pa.table({"text": ["what is 2 + 3"]}), "demos.parquet")
    makes = ["warm_start.demos_path=demos.parquet", "warm_start.out=new", "model.path=new"]
    own = [override for override in OWN if override != "warm_start=null"]
    with refused(DataError) as caught:
        rehearse_here(load_config("calculator", [*own, *makes]), whole=True)
    assert str(caught.value).startswith("warm_start.demos_path: demos.parquet")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.path=other_columns.jsonl"], "data.path: other_columns.jsonl, row 0"),
        (["data.path=empty.jsonl"], "data.path: empty.jsonl"),
        (["data.path=missing.jsonl"], "data.path: no file missing.jsonl"),
        (["model.path=missing"], "model.path: no folder missing"),
        (["model.path=no_weights"], "model.path: no_weights"),
        (["tracking.backends=[wandbb]"], "argument 'tracking.backends=[wandbb]'"),
        (["tracking.backends=[swanlab]", "tracking.offline=false"], "tracking.offline=false: swanlab"),
        (["agent.tools=[calculater]"], "agent.tools: "),
        (["rollout.group_size=1"], "algorithm.advantage=grpo"),
        (["trainer.ranks=3", "trainer.sequence_parallel=2"], "trainer."),
    ],
)
def test_a_missing_input_or_a_setting_that_does_not_fit_is_named_first(
    overrides: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal_of_dry_run(capsys, *overrides).startswith(f"error: {key}") and not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.device=gpu", "model.device=gpu"),
        (
            "trainer.steps=1000000000 trainer.checkpoint_every=1 trainer.keep_checkpoints=100000000",
            "launcher.run_dir: ",
        ),
    ],
)
def test_a_machine_that_is_too_small_is_named(tmp_path: Path, override: str, named: str) -> None:
    with refused(UserError) as caught:
        plan_here(load_config("calculator", [*OWN, *override.split()]), tmp_path / "run")
    assert str(caught.value).startswith(named)


# test_prepare.py has each such environment, without the rest of a dry run.
@pytest.mark.slow
def test_an_environment_that_cannot_begin_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["agent.environment=mine.py:World", "agent.loop=tool_agent", "agent.unprinted_tools=allow"]
    assert refusal_of_dry_run(capsys, *own).startswith("error: agent.environment: ")


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        own = ["queue.curve=always", f"queue.port={taken.getsockname()[1]}"]
        assert refusal_of_dry_run(capsys, *own).startswith("error: queue.port: ")
