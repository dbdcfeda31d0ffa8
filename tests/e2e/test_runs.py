"""Whole runs as real processes: both modes, killed roles, interruption and resume, bad input."""

import gzip
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import vllm_python
from tests.e2e.command import HARDLY_WARM, RL_ASYNC

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
STEPS = 8
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    "eval.every=4",
    "eval.tasks=4",
    "queue.lease_s=3",
    *HARDLY_WARM,
    "launcher.stop_timeout_s=5",
]
REQUIRED = (
    *("step", "version", "time", "reward/mean", "reward/std"),
    *("rollout/turns_mean", "rollout/tool_calls_mean", "rollout/response_tokens_mean"),
    *("staleness/mean", "staleness/max", "correction/kl", "correction/ess", "loss/policy", "loss/grad_norm"),
    *("time/step_s", "time/wait_batch_s", "time/train_s", "time/sync_s", "sync/pause_s"),
    *("queue/ready_groups", "queue/leased_groups", "tokens/trained"),
)


@pytest.fixture(scope="module")
def home(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with data and a model that was hardly trained."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(artifacts, folder / "artifacts")
    return folder


def call(cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([RL_ASYNC, *arguments], cwd=cwd, capture_output=True, text=True, timeout=200)


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts ``rl-async launch`` in the background; what it leaves behind is killed by pid."""
    launched: list[subprocess.Popen[str]] = []

    def launch(name: str, *more: str, mode: str = "disaggregated", config: str = "calculator") -> Any:
        command = [RL_ASYNC, "launch", "--mode", mode, "--config", config, "--name", name, *SMALL, *more]
        process = subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        launched.append(process)
        return process

    yield launch
    for process in launched:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def finish(process: "subprocess.Popen[str]", code: int = 0, timeout_s: float = 200) -> str:
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == code, output[-4000:]
    return output


def metrics(home: Path, name: str) -> list[dict[str, float]]:
    path = home / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def role(home: Path, name: str, module: str) -> psutil.Process:
    """The process of a role in a run."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        line = process.info["cmdline"] or []
        if module in line and f"runs/{name}" in line and process.info["cwd"] == str(home):
            return process
    raise AssertionError(f"no process {module} in run {name}")


def wait_for_steps(home: Path, name: str, count: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while len(metrics(home, name)) < count:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"run {name} did not reach step {count}"
        time.sleep(0.05)


def log_of(home: Path, name: str, process: str) -> str:
    return (home / "runs" / name / "logs" / f"{process}.log").read_text()


def assert_complete(home: Path, name: str, bound: int) -> list[dict[str, float]]:
    """Every step once (counting the last lineage to train it), the bound held, and the outside audit agrees."""
    rows = metrics(home, name)
    assert sorted({m["step"] for m in rows}) == list(range(STEPS))
    assert max(m["staleness/max"] for m in rows) <= bound
    audit = call(home, "audit", f"runs/{name}")
    assert audit.returncode == 0 and "ok: every admitted group" in audit.stdout, audit.stdout + audit.stderr
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if f"runs/{name}" in (p.info["cmdline"] or [])]
    assert not left, "processes outlived the run"
    return rows


def assert_compared(rows: list[dict[str, float]]) -> None:
    """Engines were asked for samples after the first and the sixth publication, and agreed with the trainer."""
    compared = {m["step"]: m["mismatch/max"] for m in rows if "mismatch/max" in m}
    assert list(compared) == [0, 5]
    assert max(compared.values()) < 1e-4


def test_disaggregated(home: Path, start: Callable[..., Any]) -> None:
    finish(start("disaggregated"))
    rows = assert_complete(home, "disaggregated", bound=1)
    assert len(rows) == STEPS
    for key in REQUIRED:
        assert all(key in m for m in rows), key
    assert max(m["staleness/max"] for m in rows) == 1
    assert rows[0]["correction/logprob_diff_max"] < 1e-4, "engine and trainer disagree about the same weights"
    assert_compared(rows)


def test_colocated(home: Path, start: Callable[..., Any]) -> None:
    finish(start("colocated", mode="colocated", config="calculator-sync"))
    rows = assert_complete(home, "colocated", bound=0)
    assert max(m["correction/logprob_diff_max"] for m in rows) < 1e-4, "on-policy in every step"
    assert_compared(rows)


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("mode", "config", "bound", "flags"),
    [("disaggregated", "calculator", 1, "[]"), ("colocated", "calculator-sync", 0, "[--enforce-eager]")],
)
def test_vllm(home: Path, start: Callable[..., Any], mode: str, config: str, bound: int, flags: str) -> None:
    """Compiled, and not, which starts sooner."""
    overrides = ["rollout.engine=vllm", f"rollout.python={vllm_python()}", f"rollout.engine_args={flags}"]
    finish(start(f"vllm-{mode}", *overrides, mode=mode, config=config), timeout_s=400)
    rows = assert_complete(home, f"vllm-{mode}", bound)
    on_policy = [m["correction/logprob_diff_max"] for m in rows if m["staleness/max"] == 0]
    assert on_policy and max(on_policy) < 1e-4, "vLLM and the trainer disagree about the same weights"


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


def test_two_trainer_ranks_share_every_batch(home: Path, start: Callable[..., Any]) -> None:
    """And agree on when the queue holds enough trained bytes for a checkpoint out of turn."""
    finish(start("ranks", "trainer.ranks=2", "trainer.checkpoint_every=0", "queue.max_bytes=100000"))
    rows = assert_complete(home, "ranks", bound=1)
    assert len(rows) == STEPS
    assert rows[0]["correction/logprob_diff_max"] < 1e-4, "engine and trainer disagree about the same weights"
    assert_compared(rows)
    assert_ranks_share_the_rows(home, "ranks", 2)
    evaluations = (home / "runs" / "ranks" / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(evaluations[-1])["eval/step"] == STEPS
    checkpoints = sorted(path.name for path in (home / "runs" / "ranks" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2 and checkpoints[-1] == f"step-{STEPS:06d}", "the last two are kept"


@pytest.mark.slow
def test_two_trainer_ranks_take_turns_with_the_engine(home: Path, start: Callable[..., Any]) -> None:
    finish(start("turns", "trainer.ranks=2", mode="colocated", config="calculator-sync"))
    rows = assert_complete(home, "turns", bound=0)
    assert max(m["correction/logprob_diff_max"] for m in rows) < 1e-4, "on-policy in every step"
    assert_compared(rows)
    assert_ranks_share_the_rows(home, "turns", 2)


def test_killed_engine_and_worker(home: Path, start: Callable[..., Any]) -> None:
    run = start("killed", "debug.min_train_s=0.5")
    wait_for_steps(home, "killed", 2, run)
    role(home, "killed", "rl_async.rollout_server").kill()
    wait_for_steps(home, "killed", 4, run)
    role(home, "killed", "rl_async.agent_loop").kill()
    finish(run)
    assert len(assert_complete(home, "killed", bound=1)) == STEPS


def test_killed_trainer_goes_on_from_its_checkpoint(home: Path, start: Callable[..., Any]) -> None:
    run = start("trainer", "debug.min_train_s=0.5")
    wait_for_steps(home, "trainer", 5, run)
    role(home, "trainer", "rl_async.trainer").kill()
    finish(run)
    rows = assert_complete(home, "trainer", bound=1)
    assert {m["lineage"] for m in rows} == {0, 1}
    assert min(m["step"] for m in rows if m["lineage"] == 1) == 4


@pytest.mark.slow
def test_a_killed_colocated_trainer_wakes_the_engines_it_left_asleep(home: Path, start: Callable[..., Any]) -> None:
    run = start("asleep", "debug.min_train_s=0.5", mode="colocated", config="calculator-sync")
    wait_for_steps(home, "asleep", 5, run)
    engine = role(home, "asleep", "rl_async.rollout_server").pid
    role(home, "asleep", "rl_async.trainer").kill()  # most of a step is training, while the engine sleeps
    wait_for_steps(home, "asleep", 7, run)
    assert role(home, "asleep", "rl_async.rollout_server").pid == engine, "the engine was replaced"
    finish(run)
    assert {m["lineage"] for m in assert_complete(home, "asleep", bound=0)} == {0, 1}


def test_interrupt_and_resume_everything(home: Path, start: Callable[..., Any]) -> None:
    run = start("resumed", "debug.min_train_s=0.3", "launcher.stop_timeout_s=40")
    wait_for_steps(home, "resumed", 5, run)
    run.send_signal(signal.SIGINT)
    finish(run, code=130)
    saved = re.search(r"asked to stop: saving (\d+) completed steps", log_of(home, "resumed", "trainer-0"))
    assert saved is not None
    finish(start("resumed"))  # --resume is the default for a run that did not reach its end
    assert f"resuming after step {saved[1]} as lineage 1" in log_of(home, "resumed", "trainer-0"), "no step was lost"
    assert_complete(home, "resumed", bound=1)
    journals = re.findall(r"(\d+) transitions in the journal", log_of(home, "resumed", "queue"))
    assert len(journals) == 2 and int(journals[0]) == 0 < int(journals[1]), "the second queue goes on from the first"
    assert re.search(r"the queue kept [1-9]\d* groups and admits 0 again", log_of(home, "resumed", "trainer-0"))


BROKEN_TOOL = """
from rl_async.agent_loop.chat_formats.hermes import parse_hermes

def broken(x: int) -> int:
    '''Fails.'''
    raise RuntimeError("boom")

async def calls_it(episode):
    reason = await episode.generate()
    if reason != "stop":
        return reason
    calls = parse_hermes('<tool_call>{"name": "broken", "arguments": {"x": 1}}</tool_call>')
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


def one_clear_error(done: "subprocess.CompletedProcess[str]", *words: str) -> None:
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if "error:" in line]
    assert len(errors) == 1, text
    assert all(word in errors[0] for word in words), errors[0]


def bad_launch(home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return call(home, "launch", "--mode", "disaggregated", "--config", "calculator", *SMALL, *arguments)


def test_bad_config_is_one_clear_error(home: Path) -> None:
    one_clear_error(bad_launch(home, "trainer.stepz=3"), "trainer.stepz", "did you mean trainer.steps")
    one_clear_error(bad_launch(home, "trainer.steps=many"), "trainer.steps=many", "int")
    one_clear_error(call(home, "launch", "--mode", "disaggregated", "--config", "no/such.yaml"), "no/such.yaml")
    one_clear_error(bad_launch(home, "--name", "fresh", "--resume"), "fresh")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one_clear_error(bad_launch(home, f"queue.port={port}"), "queue.port", str(port))


def test_bad_data_is_one_clear_error(home: Path) -> None:
    (home / "empty.jsonl").write_text("")
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "hi"}], "reward_model": {}, "extra_info": {}}
    (home / "untrue.jsonl").write_text(json.dumps(row) + "\n")
    none = ("data.make=null", "data.eval_path=null")
    one_clear_error(bad_launch(home, "data.path=missing.jsonl", *none), "missing.jsonl")
    one_clear_error(bad_launch(home, "data.path=empty.jsonl", *none), "empty.jsonl")
    one_clear_error(bad_launch(home, "data.path=untrue.jsonl", *none), "untrue.jsonl", "ground_truth")
    bare = home / "bare"
    bare.mkdir(exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        (bare / file).write_bytes((home / "artifacts" / "calculator" / "model" / file).read_bytes())
    one_clear_error(bad_launch(home, "model.path=bare", "warm_start=null"), "bare", "tokenizer")


def rows_of(home: Path, name: str) -> list[dict[str, Any]]:
    """The trajectories of a run's first step, as anybody would read them."""
    with gzip.open(home / "runs" / name / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def test_a_tool_that_raises_is_told_to_the_model_and_the_run_goes_on(home: Path, start: Callable[..., Any]) -> None:
    (home / "broken_tool.py").write_text(BROKEN_TOOL)
    question = {"role": "user", "content": "What is 1+2+3?"}
    task = {"data_source": "x", "prompt": [question], "reward_model": {"ground_truth": "6"}, "extra_info": {}}
    (home / "plain.jsonl").write_text(json.dumps(task) + "\n")  # without the agent_name that would win
    run = start(
        "brokentool",
        "trainer.steps=1",
        "agent.tools=[broken_tool.py:broken]",
        "agent.loop=broken_tool.py:calls_it",
        "data.path=plain.jsonl",
        "data.eval_path=null",
        "data.make=null",
    )
    finish(run)
    assert metrics(home, "brokentool")[0]["rollout/tool_errors_mean"] > 0
    called = [call for row in rows_of(home, "brokentool") for turn in row["turns"] for call in turn["tool_calls"]]
    assert called and all("boom" in call["error"] and "error" in call["result"] for call in called)


def test_a_reward_that_hangs_marks_its_trajectories_and_the_run_goes_on(home: Path, start: Callable[..., Any]) -> None:
    (home / "hanging.py").write_text(HANGING_REWARD)
    finish(
        start(
            "hanging",
            "trainer.steps=1",
            "reward.functions=[{name: exact_answer}, {name: 'hanging.py:score'}]",
            "reward.timeout_s=0.5",
            "reward.processes=2",
            "eval.tasks=1",
        )
    )
    step = metrics(home, "hanging")[0]
    assert step["reward/unscored_fraction"] == step["rollout/error_fraction"] > 0
    marked = [row for row in rows_of(home, "hanging") if not row["scored"]]
    assert len(marked) == step["batch/trajectories"] * step["reward/unscored_fraction"]
    assert all("hanging.py:score" in row["error"] and "0.5 s" in row["error"] for row in marked)


def test_a_reward_that_always_fails_ends_the_run_with_its_message(home: Path, start: Callable[..., Any]) -> None:
    (home / "failing.py").write_text("def score(**_):\n    raise KeyError('no such column')\n")
    output = finish(start("failing", "reward.functions=[{name: 'failing.py:score'}]", "eval.tasks=1"), code=1)
    assert "none of the batch's 16 trajectories could be scored" in output
    assert "no such column" in output


@pytest.mark.slow
def test_a_run_goes_on_when_its_queue_is_killed_three_times(home: Path, start: Callable[..., Any]) -> None:
    process = start("queue-killed")
    for steps in (1, 3, 5):
        wait_for_steps(home, "queue-killed", steps, process)
        role(home, "queue-killed", "rl_async.transfer_queue").kill()
    finish(process)
    rows = assert_complete(home, "queue-killed", bound=1)
    assert len(rows) == STEPS, "no step was trained twice: the trainer never noticed"


@pytest.mark.slow
def test_two_ranks_go_on_when_the_only_payload_shard_is_killed(home: Path, start: Callable[..., Any]) -> None:
    """Twice, and then the trainer, whose batches since the checkpoint are partly lost. All keep their members."""
    run = start("shards", "queue.shards=1", "trainer.ranks=2", "debug.min_train_s=0.3")
    for steps in (2, 4):
        wait_for_steps(home, "shards", steps, run)
        role(home, "shards", "rl_async.transfer_queue.shard").kill()
    wait_for_steps(home, "shards", 6, run)
    role(home, "shards", "rl_async.trainer").kill()
    finish(run)
    assert_complete(home, "shards", bound=1)
    ledger = [json.loads(line) for line in (home / "runs" / "shards" / "ledger.jsonl").read_text().splitlines()]
    lost = [line for line in ledger if line["event"] == "lost"]
    assert len(lost) == 2 and all(line["rows"] for line in lost)
