"""Fine-tuning as a user runs it: interrupted in every way, on more ranks, with bad input."""

import json
import math
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.load import dump, load_resolved
from tests.e2e import small_runs as command_line
from tests.e2e.small_runs import RL_ASYNC
from tests.support.forked import Forked
from tests.support.rounding import assert_trained_alike, pass_rounding
from tests.unit.agent_loop.conftest import demos

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
STEPS, RATE = 16, 1e-3
# The longest sums are those of gradients, over at most 8 conversations of 128 tokens.
TERMS = 8 * 128
# Of losses of two layers, for a magnitude of 1.
ROUNDED = pass_rounding(1.0, layers=2, terms=TERMS, backward=True)
SETTINGS = [
    *("--model", "base", "--data", "chats.jsonl", "--epochs", "2", "--batch-size", "8", "--learning-rate", str(RATE)),
    *("trainer.checkpoint_every=2", "trainer.keep_checkpoints=20", "trainer.max_tokens_per_microbatch=128"),
    *("finetune.eval_every=6", "finetune.held_out=0.1"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with conversations and a random model."""
    folder = tmp_path_factory.mktemp("home")
    conversations = demos("calculator", 70)
    lines = (json.dumps({"messages": messages}) + "\n" for messages in conversations)
    (folder / "chats.jsonl").write_text("".join(lines))
    tokenizer = train_tokenizer(conversations, 150)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **shape, **heads)).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder


def call(home: Path, out: str, *more: str) -> "subprocess.CompletedProcess[str]":
    return command_line.call(home, "sft", *SETTINGS, "--out", out, *more)


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> "subprocess.CompletedProcess[str]":
    """A run on one rank from beginning to end, by the installed command, into ``plain``."""
    command = [RL_ASYNC, "sft", *SETTINGS, "--out", "plain"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + log_of(home / "plain.run")
    return done


def log_of(run: Path) -> str:
    return "".join(file.read_text() for file in (run / "logs").glob("*.log"))[-4000:]


def weights(home: Path, out: str) -> dict[str, Tensor]:
    return load_file(home / out / "model.safetensors")


def lines_of(home: Path, out: str, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    return [json.loads(line) for line in (home / f"{out}.run" / name).read_bytes().split(b"\n")[:-1]]


def assert_as_undisturbed(home: Path, out: str) -> None:
    """Bit-equal weights and losses, and every step reported once."""
    expected, found = weights(home, "plain"), weights(home, out)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    for name, key in (("metrics.jsonl", "loss/train"), ("evaluations.jsonl", "eval/loss")):
        assert [line[key] for line in lines_of(home, out, name)] == [
            line[key] for line in lines_of(home, "plain", name)
        ]


def test_a_run_shows_its_losses_and_writes_a_model(home: Path, undisturbed: "subprocess.CompletedProcess[str]") -> None:
    metrics, evaluations = lines_of(home, "plain"), lines_of(home, "plain", "evaluations.jsonl")
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert [line["eval/step"] for line in evaluations] == [0, 6, 12, STEPS]
    assert evaluations[-1]["eval/loss"] < evaluations[0]["eval/loss"] - 0.3
    shown = undisturbed.stdout.splitlines()
    assert "float32" in shown[0] and "launcher.threads" in shown[1]
    assert shown[2].startswith("base on chats.jsonl: 63 conversations, 7 held out; ")
    assert shown[4].split() == ["steps", "epoch", "loss", "held-out", "tokens/s", "rate", "left"]
    assert len(shown) == 5 + 1 + STEPS + 1, undisturbed.stdout
    assert f"{evaluations[-1]['eval/loss']:.4f}" in shown[-1] and "model: plain" in shown[-1]
    model = AutoModelForCausalLM.from_pretrained(home / "plain")
    assert AutoTokenizer.from_pretrained(home / "plain").chat_template
    generation = "generation_config.json"
    assert (home / "plain" / generation).read_bytes() == (home / "base" / generation).read_bytes()
    assert not torch.equal(model.lm_head.weight, load_file(home / "base" / "model.safetensors")["lm_head.weight"])


def test_given_again_a_finished_run_is_left_alone_and_another_one_refused(
    home: Path, undisturbed: "subprocess.CompletedProcess[str]"
) -> None:
    again = call(home, "plain")
    assert again.returncode == 0
    assert len(lines_of(home, "plain")) == STEPS, "nothing was trained again"
    other = call(home, "plain", "seed=1")
    assert other.returncode == 2 and other.stderr.startswith("error: seed=1: ") and "plain.run" in other.stderr


@pytest.mark.slow
def test_resumed_from_a_checkpoint_it_ends_as_if_undisturbed(
    home: Path, undisturbed: "subprocess.CompletedProcess[str]"
) -> None:
    run = home / "resumed.run"
    shutil.copytree(home / "plain.run", run)
    config = dump(load_resolved(run / "config.yaml", ["finetune.out=resumed"]))
    (run / "config.yaml").write_text(config)
    for folder in run.glob("checkpoints/step-*"):
        if folder.name > "step-000004":
            shutil.rmtree(folder)
    done = call(home, "resumed")
    assert done.returncode == 0, done.stderr
    assert "at step 4" in done.stdout
    assert_as_undisturbed(home, "resumed")


@pytest.fixture
def started(home: Path) -> Iterator[list[Forked]]:
    """Launchers that are killed at the end; their ranks go with them."""
    processes: list[Forked] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def works_in(fork: psutil.Process, home: Path) -> bool:
    """Whether the process is in the folder; others of the same fork server may have ended, or end meanwhile."""
    with suppress(psutil.Error):
        return fork.cwd() == str(home)
    return False


@pytest.mark.parametrize("victim", ["launcher", pytest.param("rank", marks=pytest.mark.slow)])
def test_killed_in_the_middle_it_ends_as_if_undisturbed(
    home: Path,
    undisturbed: "subprocess.CompletedProcess[str]",
    started: list[Forked],
    victim: str,
) -> None:
    out = f"killed-{victim}"
    launcher = command_line.start(home, "sft", *SETTINGS, "--out", out)
    started.append(launcher)
    metrics, deadline = home / f"{out}.run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.01)
    forks = psutil.Process(launcher.pid).parent().children()
    (rank,) = [fork for fork in forks if fork.pid != launcher.pid and works_in(fork, home)]
    (launcher if victim == "launcher" else rank).send_signal(signal.SIGKILL)
    if victim == "launcher":
        rank.wait(20)
        assert not (home / out).exists(), "it was killed in the middle"
        done = call(home, out)
        assert done.returncode == 0, done.stderr
        assert "at step" in done.stdout
    else:
        launcher.communicate(timeout=120)
        assert launcher.returncode == 0
        assert "trainer-0 ended (killed by SIGKILL)" in log_of(home / f"{out}.run")
    assert_as_undisturbed(home, out)


@pytest.mark.slow
def test_two_ranks_train_as_one_does(home: Path, undisturbed: "subprocess.CompletedProcess[str]") -> None:
    done = call(home, "two", "--ranks", "2")
    assert done.returncode == 0, done.stderr + log_of(home / "two.run")
    for one, two in zip(lines_of(home, "plain"), lines_of(home, "two"), strict=True):
        assert two["loss/train"] == pytest.approx(one["loss/train"], rel=ROUNDED)
    evaluated = zip(
        lines_of(home, "plain", "evaluations.jsonl"), lines_of(home, "two", "evaluations.jsonl"), strict=True
    )
    for one, two in evaluated:
        assert two["eval/loss"] == pytest.approx(one["eval/loss"], rel=ROUNDED)
    alike = {"rate": RATE, "steps": STEPS, "layers": 2, "terms": TERMS}
    assert_trained_alike(weights(home, "two"), weights(home, "plain"), **alike)


@pytest.mark.slow
def test_asked_to_stop_it_saves_and_goes_on_later(
    home: Path, undisturbed: "subprocess.CompletedProcess[str]", started: list[Forked]
) -> None:
    launcher = command_line.start(home, "sft", *SETTINGS, "--out", "stopped", "trainer.checkpoint_every=0")
    started.append(launcher)
    metrics, deadline = home / "stopped.run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.01)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT
    assert re.search(rf"with [1-9]\d* of {STEPS} steps saved", errors)
    assert call(home, "stopped").returncode == 0
    expected, found = weights(home, "plain"), weights(home, "stopped")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_bad_input_is_named_before_anything_starts(home: Path) -> None:
    good = (home / "chats.jsonl").read_text()
    (home / "bad.jsonl").write_text(good + '{"messages": [}\n')
    bad = call(home, "bad", "data.path=bad.jsonl")
    assert bad.returncode == 2 and bad.stderr.startswith("error: bad.jsonl, line 71: ")
    long = call(home, "bad", "finetune.max_tokens=20")
    assert long.returncode == 2 and "finetune.too_long=skip" in long.stderr and "chats.jsonl, line " in long.stderr
    assert len(long.stderr.splitlines()) == 1
    assert not (home / "bad").exists()
    missing = command_line.call(home, "sft", "--model", "base")
    assert missing.returncode == 2 and "--data, --out" in missing.stderr
    rate = call(home, "bad", "trainer.learning_rate=1e-3")
    assert rate.returncode == 2 and "set finetune.learning_rate" in rate.stderr


PREFERRING = [
    *("--model", "base", "--data", "pairs.jsonl", "--epochs", "2", "--batch-size", "8", "--learning-rate", str(RATE)),
    *("trainer.checkpoint_every=2", "trainer.keep_checkpoints=20", "trainer.max_tokens_per_microbatch=128"),
    *("finetune.held_out=0.1", "finetune.preferences.beta=0.5"),
]


@pytest.fixture(scope="module")
def preferred(home: Path) -> Path:
    """The folder of a run on one rank that learned to prefer the answers to one answer, the same for all."""
    conversations = demos("calculator", 70)
    pairs = [
        {"chosen": messages, "rejected": [*messages[:-1], conversations[0][-1]]}
        for messages in conversations
        if messages[-1] != conversations[0][-1]
    ]
    (home / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    done = command_line.call(home, "dpo", *PREFERRING, "--out", "preferred")
    assert done.returncode == 0, done.stderr + log_of(home / "preferred.run")
    return home / "preferred"


@pytest.mark.slow
def test_a_run_of_pairs_begins_at_indifference_and_learns_to_prefer(home: Path, preferred: Path) -> None:
    evaluations = lines_of(home, "preferred", "evaluations.jsonl")
    assert evaluations[0]["eval/loss"] == pytest.approx(math.log(2), rel=ROUNDED)
    assert evaluations[0]["eval/margin"] == pytest.approx(0.0, abs=ROUNDED)
    trained = lines_of(home, "preferred")
    assert trained[-1]["loss/train"] < trained[0]["loss/train"]
    assert trained[-1]["preference/margin"] > 0 and trained[-1]["preference/accuracy"] > 0.5
    assert not torch.equal(weights(home, "preferred")["lm_head.weight"], weights(home, "base")["lm_head.weight"])


@pytest.mark.slow
def test_pairs_train_alike_on_two_ranks_and_after_a_checkpoint(home: Path, preferred: Path) -> None:
    run = home / "continued.run"
    shutil.copytree(home / "preferred.run", run)
    (run / "config.yaml").write_text(dump(load_resolved(run / "config.yaml", ["finetune.out=continued"])))
    for folder in run.glob("checkpoints/step-*"):
        if folder.name > "step-000004":
            shutil.rmtree(folder)
    for out, more in (("continued", []), ("both", ["--ranks", "2"])):
        done = command_line.call(home, "dpo", *PREFERRING, "--out", out, *more)
        assert done.returncode == 0, done.stderr + log_of(home / f"{out}.run")
    expected = weights(home, "preferred")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(home, "continued").items())
    alike = {"rate": RATE, "steps": len(lines_of(home, "preferred")), "layers": 2, "terms": TERMS}
    assert_trained_alike(weights(home, "both"), expected, **alike)
