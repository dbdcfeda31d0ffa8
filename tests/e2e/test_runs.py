"""Whole runs as real processes: both modes, killed roles, interruption and resume, bad input."""

import gzip
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.folder.run_folder import checkpoints
from tests.conftest import vllm_python
from tests.e2e import command as command_line
from tests.e2e.command import HARDLY_WARM, RL_ASYNC, succeed
from tests.support.forked import Forked

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


Run = Forked | subprocess.Popen[str]


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., Run]]:
    """Start ``rl-async launch`` in the background, with forked roles or ``installed``; what is left of it is killed."""
    launched: list[Run] = []

    def launch(
        name: str,
        *more: str,
        mode: str = "disaggregated",
        config: str = "calculator",
        installed: bool = False,
    ) -> Run:
        command = ["launch", "--mode", mode, "--config", config, "--name", name, *SMALL, *more]
        if installed:
            process: Run = subprocess.Popen(
                [RL_ASYNC, *command], cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        else:
            process = command_line.start(home, *command)
        launched.append(process)
        return process

    yield launch
    for process in launched:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def finish(process: Run, code: int = 0, timeout_s: float = 200) -> str:
    output = "".join(part or "" for part in process.communicate(timeout=timeout_s))
    assert process.returncode == code, output[-4000:]
    return output


def metrics(home: Path, name: str) -> list[dict[str, float]]:
    path = home / "runs" / name / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last line may be half written
    return [json.loads(line) for line in whole]


def pids(home: Path, name: str) -> dict[str, int]:
    """The process of each role of a run, by the role's name; the latest where it was started again."""
    listed = json.loads((home / "runs" / name / "processes.json").read_text())
    return {process["name"]: process["pid"] for process in listed}


def kill(home: Path, name: str, role: str) -> None:
    psutil.Process(pids(home, name)[role]).kill()


def wait_for_steps(home: Path, name: str, count: int, process: Run) -> None:
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
    assert "ok: every admitted group" in succeed(home, "audit", f"runs/{name}")  # "ok so far" exits with 0 as well
    commands = (p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"]))
    assert not any(f"runs/{name}" in command for command in commands), "processes outlived the run"
    assert not any(psutil.pid_exists(pid) for pid in pids(home, name).values()), "roles outlived the run"
    return rows


def assert_compared(rows: list[dict[str, float]]) -> None:
    """Engines were asked for samples after the first and the sixth publication, and agreed with the trainer."""
    compared = {m["step"]: m["mismatch/max"] for m in rows if "mismatch/max" in m}
    assert list(compared) == [0, 5]
    assert max(compared.values()) < 1e-4


def test_disaggregated(home: Path, start: Callable[..., Run]) -> None:
    finish(start("disaggregated", installed=True))
    rows = assert_complete(home, "disaggregated", bound=1)
    assert len(rows) == STEPS
    for key in REQUIRED:
        assert all(key in m for m in rows), key
    assert max(m["staleness/max"] for m in rows) == 1
    assert rows[0]["correction/logprob_diff_max"] < 1e-4, "engine and trainer disagree about the same weights"
    assert_compared(rows)


def test_colocated(home: Path, start: Callable[..., Run]) -> None:
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
def test_vllm(home: Path, start: Callable[..., Run], mode: str, config: str, bound: int, flags: str) -> None:
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


def test_two_trainer_ranks_share_every_batch(home: Path, start: Callable[..., Run]) -> None:
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
def test_two_trainer_ranks_take_turns_with_the_engine(home: Path, start: Callable[..., Run]) -> None:
    finish(start("turns", "trainer.ranks=2", mode="colocated", config="calculator-sync"))
    rows = assert_complete(home, "turns", bound=0)
    assert max(m["correction/logprob_diff_max"] for m in rows) < 1e-4, "on-policy in every step"
    assert_compared(rows)
    assert_ranks_share_the_rows(home, "turns", 2)


def test_killed_engine_and_worker_and_then_trainer(home: Path, start: Callable[..., Run]) -> None:
    """Engines and workers are replaced without a step trained twice; the trainer goes on from its checkpoint."""
    run = start("killed", "debug.min_train_s=0.5")
    for steps, victim in ((1, "engine-0"), (3, "worker-0"), (6, "trainer-0")):
        wait_for_steps(home, "killed", steps, run)
        kill(home, "killed", victim)
    finish(run)
    rows = assert_complete(home, "killed", bound=1)
    first, second = ([m["step"] for m in rows if m["lineage"] == lineage] for lineage in (0, 1))
    assert first == list(range(len(first))) and len(first) >= 6
    assert second == list(range(second[0], STEPS)) and second[0] in (4, 6), "the last checkpoint, of every second step"


@pytest.mark.slow
def test_a_killed_colocated_trainer_wakes_the_engines_it_left_asleep(home: Path, start: Callable[..., Run]) -> None:
    run = start("asleep", "debug.min_train_s=0.5", mode="colocated", config="calculator-sync")
    wait_for_steps(home, "asleep", 5, run)
    engine = pids(home, "asleep")["engine-0"]
    kill(home, "asleep", "trainer-0")  # most of a step is training, while the engine sleeps
    wait_for_steps(home, "asleep", 7, run)
    assert pids(home, "asleep")["engine-0"] == engine, "the engine was replaced"
    finish(run)
    assert {m["lineage"] for m in assert_complete(home, "asleep", bound=0)} == {0, 1}


def test_interrupt_and_resume_everything(home: Path, start: Callable[..., Run]) -> None:
    run = start("resumed", "debug.min_train_s=0.3", "launcher.stop_timeout_s=40", installed=True)
    wait_for_steps(home, "resumed", 5, run)
    run.send_signal(signal.SIGINT)
    finish(run, code=130)
    saved = re.search(r"asked to stop: saving (\d+) completed steps", log_of(home, "resumed", "trainer-0"))
    assert saved is not None
    finish(start("resumed"))  # --resume is the default for a run that did not reach its end
    assert f"resuming at step {saved[1]} as lineage 1" in log_of(home, "resumed", "trainer-0"), "no step was lost"
    assert_complete(home, "resumed", bound=1)
    journals = re.findall(r"(\d+) transitions in the journal", log_of(home, "resumed", "queue"))
    assert len(journals) == 2 and int(journals[0]) == 0 < int(journals[1]), "the second queue goes on from the first"
    assert re.search(r"the queue kept [1-9]\d* groups and admits 0 again", log_of(home, "resumed", "trainer-0"))


def kill_launcher(home: Path, name: str, run: Run) -> None:
    """Return when no process of the run is left."""
    run.kill()
    run.wait(timeout=30)
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids(home, name).values()):
        assert time.monotonic() < deadline, "roles outlived the launcher"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("journal", ["sqlite", "memory"])
def test_a_run_that_lost_its_launcher_before_the_first_checkpoint_is_resumed(
    home: Path, start: Callable[..., Run], journal: str
) -> None:
    name = f"unsaved-{journal}"
    run = start(name, f"queue.journal={journal}", "trainer.checkpoint_every=0", "debug.min_train_s=0.3")
    wait_for_steps(home, name, 2, run)
    kill_launcher(home, name, run)
    assert not checkpoints(home / "runs" / name)
    finish(start(name))
    assert_complete(home, name, bound=1)


@pytest.mark.slow
def test_a_run_that_lost_its_launcher_after_the_last_checkpoint_is_resumed_to_tell_its_end(
    home: Path, start: Callable[..., Run]
) -> None:
    run = start("untold", "debug.min_train_s=0.3", "trainer.checkpoint_every=1")
    wait_for_steps(home, "untold", 3, run)
    kill_launcher(home, "untold", run)
    done = checkpoints(home / "runs" / "untold")[-1]
    finish(start("untold", f"trainer.steps={done}"))
    assert succeed(home, "audit", "runs/untold").splitlines()[-1].startswith("ok: ")
    assert "give a larger number" in finish(start("untold", "--resume", f"trainer.steps={done}"), code=2)


@pytest.mark.slow
def test_an_interrupted_run_saves_a_step_that_is_longer_than_its_stop_timeout(
    home: Path, start: Callable[..., Run]
) -> None:
    """Also without any checkpoint before."""
    run = start("long", "trainer.checkpoint_every=0", "debug.min_train_s=8", "launcher.stop_timeout_s=2")
    wait_for_steps(home, "long", 1, run)
    run.send_signal(signal.SIGINT)
    output = finish(run, code=130)
    saved = [int(path.name.removeprefix("step-")) for path in (home / "runs" / "long" / "checkpoints").iterdir()]
    assert saved in ([1], [2]), output
    assert "--resume --name long" in output


BROKEN_TOOL = """
from rl_async.agent_loop.chat_formats.hermes import HERMES

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

    def refuse(*arguments: str, words: Sequence[str], config: str = "calculator") -> None:
        given = [] if config != "calculator" else SMALL
        assert main(["launch", "--mode", "disaggregated", "--config", config, *given, *arguments]) == 2
        text = "".join(capsys.readouterr())
        (error,) = [line for line in text.splitlines() if "error:" in line]
        assert "Traceback" not in text and all(word in error for word in words), text

    return refuse


def test_bad_config_is_one_clear_error(refuse: Callable[..., None]) -> None:
    refuse("trainer.stepz=3", words=["trainer.stepz", "trainer.steps"])
    refuse("trainer.steps=many", words=["trainer.steps=many", "int"])
    refuse(config="no/such.yaml", words=["no/such.yaml"])
    refuse("--name", "fresh", "--resume", words=["fresh"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refuse("queue.curve=always", f"queue.port={port}", words=["queue.port", str(port)])


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


def test_the_installed_command_refuses_a_bad_config(home: Path) -> None:
    command = [RL_ASYNC, "launch", "--mode", "disaggregated", "--config", "calculator", "trainer.stepz=3"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "trainer.stepz" in done.stderr and "Traceback" not in done.stderr


def rows_of(home: Path, name: str) -> list[dict[str, Any]]:
    """The trajectories of a run's first step, as anybody would read them."""
    with gzip.open(home / "runs" / name / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


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


def test_a_reward_that_always_fails_ends_the_run_with_its_message(home: Path, start: Callable[..., Run]) -> None:
    (home / "failing.py").write_text("def score(**_):\n    raise KeyError('no such column')\n")
    output = finish(start("failing", "reward.functions=[{name: 'failing.py:score'}]", "eval.tasks=1"), code=1)
    assert "no such column" in output


@pytest.mark.slow
def test_a_run_goes_on_when_its_queue_is_killed_three_times(home: Path, start: Callable[..., Run]) -> None:
    process = start("queue-killed")
    for steps in (1, 3, 5):
        wait_for_steps(home, "queue-killed", steps, process)
        kill(home, "queue-killed", "queue")
    finish(process)
    rows = assert_complete(home, "queue-killed", bound=1)
    assert len(rows) == STEPS, "no step was trained twice: the trainer never noticed"


@pytest.mark.slow
def test_two_ranks_go_on_when_the_only_payload_shard_is_killed(home: Path, start: Callable[..., Run]) -> None:
    """Twice, and then the trainer, whose batches since the checkpoint are partly lost. All keep their members."""
    run = start("shards", "queue.shards=1", "trainer.ranks=2", "debug.min_train_s=0.3")
    for steps in (2, 4):
        wait_for_steps(home, "shards", steps, run)
        kill(home, "shards", "shard-0")
    wait_for_steps(home, "shards", 6, run)
    kill(home, "shards", "trainer-0")
    finish(run)
    assert_complete(home, "shards", bound=1)
    ledger = [json.loads(line) for line in (home / "runs" / "shards" / "ledger.jsonl").read_text().splitlines()]
    lost = [line for line in ledger if line["event"] == "lost"]
    assert len(lost) == 2 and all(line["rows"] for line in lost)
