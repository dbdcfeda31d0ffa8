"""Whole runs as real processes: both modes, several ranks, bad input."""

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rl_async.launcher.cli.__main__ import main
from tests.conftest import vllm_python
from tests.contracts.engines.engine_peers import EAGER
from tests.e2e.small_runs import APART, SMALL, STEPS, Run, assert_complete, finish, metrics
from tests.support.forked_vllm import FORKING

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
REQUIRED = (
    *("step", "version", "time", "reward/mean", "reward/std"),
    *("rollout/turns_mean", "rollout/tool_calls_mean", "rollout/response_tokens_mean"),
    *("staleness/mean", "staleness/max", "correction/kl", "correction/ess", "loss/policy", "loss/grad_norm"),
    *("time/step_s", "time/wait_batch_s", "time/train_s", "time/sync_s", "sync/pause_s"),
    *("queue/ready_groups", "queue/leased_groups", "tokens/trained"),
)


def assert_compared(rows: list[dict[str, float]]) -> None:
    """Engines were asked for samples after the first and the sixth publication, and agreed with the trainer."""
    compared = {m["step"]: m["mismatch/max"] for m in rows if "mismatch/max" in m}
    assert list(compared) == [0, 5]
    assert max(compared.values()) <= APART


def test_disaggregated(home: Path, start: Callable[..., Run]) -> None:
    finish(start("disaggregated"))
    rows = assert_complete(home, "disaggregated", bound=1)
    assert len(rows) == STEPS
    for key in REQUIRED:
        assert all(key in m for m in rows), key
    assert max(m["staleness/max"] for m in rows) == 1
    assert rows[0]["correction/logprob_diff_max"] <= APART, "engine and trainer disagree about the same weights"
    assert_compared(rows)


def test_colocated(home: Path, start: Callable[..., Run]) -> None:
    finish(start("colocated", mode="colocated", config="calculator-sync"))
    rows = assert_complete(home, "colocated", bound=0)
    assert max(m["correction/logprob_diff_max"] for m in rows) <= APART, "on-policy in every step"
    assert_compared(rows)


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("mode", "config", "bound"), [("disaggregated", "calculator", 1), ("colocated", "calculator-sync", 0)]
)
def test_vllm(home: Path, start: Callable[..., Run], mode: str, config: str, bound: int) -> None:
    """Without compiling, since that starts sooner; an engine of test_several_ranks.py compiles."""
    overrides = ["rollout.engine=vllm", f"rollout.python={vllm_python()}", f"rollout.engine_args=[{' '.join(EAGER)}]"]
    finish(start(f"vllm-{mode}", *overrides, mode=mode, config=config, environment=FORKING), timeout_s=400)
    rows = assert_complete(home, f"vllm-{mode}", bound)
    on_policy = [m["correction/logprob_diff_max"] for m in rows if m["staleness/max"] == 0]
    assert on_policy and max(on_policy) <= APART, "vLLM and the trainer disagree about the same weights"


def assert_ranks_share_the_rows(home: Path, name: str, ranks: int) -> None:
    """Each step's recorded rows are divided among the ranks, and together they are what ``trained.jsonl`` lists."""
    folder = home / "runs" / name
    lines = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    for step in range(STEPS):
        files = sorted((folder / "trajectories").glob(f"step-{step:06d}-*.jsonl.gz"))
        parsed = [map(json.loads, gzip.decompress(file.read_bytes()).splitlines()) for file in files]
        by_rank = [[(row["group_id"], row["sample"]) for row in rows_of_rank] for rows_of_rank in parsed]
        assert len(by_rank) == ranks and all(by_rank)
        rows = sorted(row for rank in by_rank for row in rank)
        assert len(set(rows)) == len(rows)
        assert rows == sorted((line["group"], line["sample"]) for line in lines if line["step"] == step)


@pytest.mark.slow
def test_two_trainer_ranks_share_every_batch(home: Path, start: Callable[..., Run]) -> None:
    """And agree on when the queue holds enough trained bytes for a checkpoint out of turn."""
    finish(start("ranks", "trainer.ranks=2", "trainer.checkpoint_every=0", "queue.max_bytes=100000"))
    rows = assert_complete(home, "ranks", bound=1)
    assert len(rows) == STEPS
    assert rows[0]["correction/logprob_diff_max"] <= APART, "engine and trainer disagree about the same weights"
    assert_compared(rows)
    assert_ranks_share_the_rows(home, "ranks", 2)
    evaluations = (home / "runs" / "ranks" / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(evaluations[-1])["eval/step"] == STEPS
    checkpoints = sorted(path.name for path in (home / "runs" / "ranks" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2 and checkpoints[-1] == f"step-{STEPS:06d}", "the last two are kept"


@pytest.mark.slow
def test_two_trainer_ranks_take_turns_with_the_engine(home: Path, start: Callable[..., Run]) -> None:
    finish(start("turns", "trainer.ranks=2", mode="colocated", config="calculator-sync"))
    rows = assert_complete(home, "turns", bound=0)
    assert max(m["correction/logprob_diff_max"] for m in rows) <= APART, "on-policy in every step"
    assert_compared(rows)
    assert_ranks_share_the_rows(home, "turns", 2)


BROKEN_TOOL = """
from rl_async.agent_loop.chat_formats.format import HERMES

def broken(x: int) -> int:
    '''Fails.'''
    raise RuntimeError("boom")

async def calls_it(episode):
    reason = await episode.generate()
    if reason != "stop":
        return reason
    calls = HERMES.parse('<tool_call>{"name": "broken", "arguments": {"x": 1}}</tool_call>')
    if not episode.add(await episode.call(calls)):
        return "length"
    return await episode.generate()
"""
HANGING_REWARD = """
import time

def score(extra_info, solution_str, **_):
    if len(solution_str) % 2:
        time.sleep(60)
    return 1.0
"""


@pytest.fixture
def refuse(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run ``rl-async launch`` in this process: it must end with 2 and one error, which has ``words``."""
    monkeypatch.chdir(home)

    def refuse(*arguments: str, words: Sequence[str]) -> None:
        assert main(["launch", "--mode", "disaggregated", "--config", "calculator", *SMALL, *arguments]) == 2
        text = "".join(capsys.readouterr())
        (error,) = [line for line in text.splitlines() if "error:" in line]
        assert "Traceback" not in text and all(word in error for word in words), text

    return refuse


def test_bad_data_is_one_clear_error(home: Path, refuse: Callable[..., None]) -> None:
    (home / "empty.jsonl").write_text("")
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "hi"}], "reward_model": {}, "extra_info": {}}
    (home / "untrue.jsonl").write_text(json.dumps(row) + "\n")
    none = ("data.make=null", "data.eval_path=null")
    refuse("data.path=missing.jsonl", *none, words=["missing.jsonl"])
    refuse("data.path=empty.jsonl", *none, words=["empty.jsonl"])
    refuse("data.path=untrue.jsonl", *none, words=["untrue.jsonl", "ground_truth"])
    bare = home / "bare"
    bare.mkdir(exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        (bare / file).write_bytes((home / "artifacts" / "calculator" / "model" / file).read_bytes())
    refuse("model.path=bare", "warm_start=null", words=["bare", "tokenizer"])


def rows_of(home: Path, name: str) -> list[dict[str, Any]]:
    """The trajectories of a run's first step, as anybody would read them."""
    with gzip.open(home / "runs" / name / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.slow
def test_a_run_goes_on_when_tools_raise_and_rewards_hang(home: Path, start: Callable[..., Run]) -> None:
    """The model gets the tool's error as its result; what could not be scored in time is marked so."""
    (home / "broken_tool.py").write_text(BROKEN_TOOL)
    (home / "hanging.py").write_text(HANGING_REWARD)
    question = {"role": "user", "content": "What is 1+2+3?"}
    task = {"data_source": "x", "prompt": [question], "reward_model": {"ground_truth": "6"}, "extra_info": {}}
    (home / "plain.jsonl").write_text(json.dumps(task) + "\n")  # without the agent_name that would win
    run = start(
        "broken",
        "trainer.steps=1",
        "agent.tools=[broken_tool.py:broken]",
        "agent.loop=broken_tool.py:calls_it",
        "data.path=plain.jsonl",
        "data.train_batch_groups=2",
        "data.eval_path=null",
        "data.make=null",
        "reward.functions=[{name: exact_answer}, {name: 'hanging.py:score'}]",
        "reward.timeout_s=0.5",
        "reward.processes=2",
    )
    finish(run)
    step, rows = metrics(home, "broken")[0], rows_of(home, "broken")
    assert step["rollout/tool_errors_mean"] > 0
    called = [call for row in rows for turn in row["turns"] for call in turn["tool_calls"]]
    assert called and all("boom" in call["error"] and "error" in call["result"] for call in called)
    assert step["reward/unscored_fraction"] == step["rollout/error_fraction"] > 0
    marked = [row for row in rows if not row["scored"]]
    assert len(marked) == step["batch/trajectories"] * step["reward/unscored_fraction"]
    assert all("hanging.py:score" in row["error"] and "reward.timeout_s" in row["error"] for row in marked)


@pytest.mark.slow
def test_a_reward_that_always_fails_ends_the_run_with_its_message(home: Path, start: Callable[..., Run]) -> None:
    # It scores the empty answer that it is tried with before the run starts.
    (home / "failing.py").write_text("def score(solution_str):\n    return {}[solution_str] if solution_str else 0.0\n")
    output = finish(
        start("failing", "reward.functions=[{name: 'failing.py:score'}]", "eval.tasks=1", "queue.max_attempts=2"),
        code=1,
    )
    assert "failing.py:score" in output and "KeyError" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "divergence"),
    [
        ("disaggregated", "sampled"),
        pytest.param("disaggregated", "reverse", marks=pytest.mark.nightly),
        pytest.param("colocated", "forward", marks=pytest.mark.nightly),
    ],
)
def test_a_teacher_teaches_without_rewards(home: Path, start: Callable[..., Run], mode: str, divergence: str) -> None:
    """The teacher has the weights that the policy starts from, three times as large."""
    name = f"taught-{divergence}"
    teacher = home / name
    shutil.copytree(home / "artifacts" / "calculator" / "model", teacher)
    weights = load_file(teacher / "model.safetensors")
    save_file({name: tensor * 3 for name, tensor in weights.items()}, teacher / "model.safetensors", {"format": "pt"})
    taught = f"algorithm.teacher={{path: {teacher}, divergence: {divergence}}}"
    finish(start(name, taught, "reward.functions=[]", mode=mode))
    rows = assert_complete(home, name, 1)
    assert all(row["loss/grad_norm"] > 0 for row in rows)
    assert all(abs(row["loss/kl_teacher"]) > APART for row in rows)


@pytest.mark.slow
def test_the_policy_teaches_itself_with_a_hint_beside_another_teacher_on_two_ranks(
    home: Path, start: Callable[..., Run]
) -> None:
    """Every task is of the source calculator, so that the other teacher's passes have no rows on either rank."""
    other = home / "artifacts" / "calculator" / "model"
    teachers = f"hint: 'It is {{ground_truth}}.', by_source: {{other: {{path: {other}}}}}"
    taught = f"algorithm.teacher={{{teachers}, divergence: reverse, top_k: 5}}"
    finish(start("hinted", taught, "reward.functions=[]", "trainer.ranks=2", mode="disaggregated"))
    rows = assert_complete(home, "hinted", 1)
    # The model is hardly trained, so a hint changes little; what it changes is learned.
    distances = [row["loss/kl_teacher"] for row in sorted(rows, key=lambda row: row["step"])]
    assert 0 < distances[-1] < distances[0] / 4
