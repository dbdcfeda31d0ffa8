"""A run that is resumed again and again, each time with other settings, takes what docs/explanation/trainer.md says."""

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.load import load_config, load_resolved
from rl_async.errors import EXIT_FAILED
from rl_async.launcher.run_folder import create
from rl_async.process.http_auth import make_tokens
from rl_async.process.private_folder import hold_private_folder
from rl_async.process.run_files import Endpoints, write_endpoints
from rl_async.trainer.checkpoints import damage_of, list_checkpoints
from rl_async.transfer_queue.auth import provide_keys
from tests.chaos.history import Expected, problems
from tests.e2e import small_runs as command
from tests.e2e.small_runs import HARDLY_WARM, call, metrics, succeed
from tests.support.forked import Forked
from tests.support.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Rewards that differ within each group, so that none is without a signal.
REWARDS = """
import itertools
_count = itertools.count()
def turns(solution_str): return float(next(_count) % 2)
"""
START = [
    "data.train_batch_groups=4",
    "rollout.group_size=2",
    "trainer.schedule=constant",
    "trainer.checkpoint_every=1",
    "eval.every=0",
    "eval.tasks=4",
    *HARDLY_WARM,
]


def at(row: dict[str, float], **wanted: float) -> bool:
    """Whether a step's metrics have these values, named with two underscores for a slash."""
    return all(row[name.replace("__", "/")] == value for name, value in wanted.items())


def evaluated(run: Path) -> list[float]:
    return [json.loads(line)["eval/step"] for line in (run / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_each_setting_that_may_change_is_followed_from_the_next_step_on(workplace: Path) -> None:
    (workplace / "rewards.py").write_text(REWARDS)
    run = workplace / "runs" / "run"
    launch = ["launch", "--config", "calculator", "--name", "run"]
    succeed(workplace, *launch, "--mode", "disaggregated", *START, "trainer.steps=1")

    def resumed(*changes: str, mode: Sequence[str] = ()) -> dict[str, Any]:
        """Resume for one more step, with changes that the run keeps from then on; the step's metrics."""
        steps = len(metrics(workplace, "run")) + 1
        succeed(workplace, *launch, "--resume", *mode, *changes, f"trainer.steps={steps}")
        rows = metrics(workplace, "run")
        assert [row["step"] for row in rows] == list(range(steps))
        assert load_resolved(run / "config.yaml", changes) == load_resolved(run / "config.yaml")
        return rows[-1]

    assert at(resumed("data.train_batch_groups=2", "trainer.minibatches=1"), batch__episodes=4.0)
    assert at(resumed("data.train_batch_groups=4", "trainer.ranks=2"), batch__episodes=8.0)
    changed = resumed(
        *("reward.functions=[{name: rewards.py:turns}]", "agent.max_turns=1", "agent.tools=[]"),
        *("rollout.max_tokens=8", "data.shuffle=false", "trainer.ranks=1"),
    )
    # Groups that the queue kept are trained as they are.
    assert at(changed, batch__episodes=8.0)
    fresh = resumed("queue.max_staleness=0", "algorithm.shaping.dynamic_sampling=true")
    assert at(fresh, staleness__max=0.0, reward__mean=0.5, reward__groups_without_signal=0.0)
    trained = resumed(
        *("algorithm.loss=gspo", "algorithm.correction=decoupled_token_is", "algorithm.advantage=rloo"),
        *("trainer.schedule=cosine", "trainer.learning_rate=1e-4", "trainer.warmup_steps=0"),
        *("trainer.weight_decay=0.1", "algorithm.kl.coef=0.1"),
    )
    assert trained["loss/grad_norm"] > 0 and trained["rollout/response_tokens_mean"] <= 8
    sent = resumed(
        *("weight_sync.way=[disk,delta]", "weight_sync.bucket_bytes=65536"),
        *("rollout.engines=2", "rollout.max_batch_size=64", "rollout.request_timeout_s=50", "queue.shards=1"),
    )
    assert at(sent, sync__engines=2.0, sync__failures=0.0)
    last = resumed(
        *("model.dtype=float32", "weight_sync.way=auto", "rollout.engines=1"),
        *("eval.every=1", "eval.tasks=2", "queue.shards=0", "queue.journal=memory"),
        mode=("--mode", "colocated"),
    )
    assert at(last, sync__failures=0.0) and evaluated(run)[-1] == len(metrics(workplace, "run"))
    assert "ok" in succeed(workplace, "audit", "runs/run")
    refused = call(workplace, *launch, "--resume", "rollout.group_size=4", "trainer.steps=99")
    assert refused.returncode == 2 and "rollout.group_size" in refused.stderr


# Trainers that freeze, are replaced, and thaw beside their living successor: refused everywhere, they change nothing.
#
# Roles are started by hand, since a launcher ends what it started before it starts it again; the network may not.

EXPECTED = Expected(steps=24, groups=4, samples=4, staleness=1)
CONFIG = [
    *(f"trainer.steps={EXPECTED.steps}", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=100"),
    *(f"data.train_batch_groups={EXPECTED.groups}", f"rollout.group_size={EXPECTED.samples}", "agent.workers=1"),
    *("rollout.engines=1", "debug.min_train_s=0.3", "eval.every=0", "eval.tasks=4", "weight_sync.mismatch.action=stop"),
    *("weight_sync.timeout_s=30", "model.dtype=float32", *HARDLY_WARM),
]
WAIT_S = 120.0


class Run:
    """Queue, engine and worker of a run, and any number of trainers, each of which resumes it."""

    def __init__(self, workplace: Path, exits: ExitStack) -> None:
        config = load_config("calculator", CONFIG, mode="disaggregated", name="fenced")
        self.folder, self._workplace, self._exits = workplace / "runs" / "fenced", workplace, exits
        create(config, self.folder)
        make_tokens(self.folder / "keys")
        provide_keys(config, self.folder)
        self._queue = f"ipc://{exits.enter_context(hold_private_folder(self.folder))}/queue"
        write_endpoints(self.folder, Endpoints(queue=self._queue))
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self._start("transfer_queue", "--address", self._queue)
        self._start("rollout_server", "--index", "0", "--port", port)
        self._start("agent_loop", "--index", "0", "--queue", self._queue)
        ended = threading.Event()
        registering = threading.Thread(target=self._keep_registered, args=(ended,))
        exits.callback(registering.join)
        exits.callback(ended.set)
        registering.start()

    def trainer(self) -> Forked:
        return self._start("trainer", "--queue", self._queue, "--resume")

    def frozen_trainer(self, lineage: int, file: str) -> Forked:
        """Start a trainer, and freeze it when it has saved and trained, just after it has written to ``file``."""
        trainer, known = self.trainer(), self.saved()
        self.until(lambda: bool(self.saved() - known) and len(self.lines("metrics.jsonl", lineage)) >= 3, trainer)
        written = len(self.lines(file, lineage))
        self.until(lambda: len(self.lines(file, lineage)) > written, trainer)
        trainer.send_signal(signal.SIGSTOP)
        assert trainer.poll() is None
        return trainer

    def until(self, condition: Callable[[], bool], trainer: Forked) -> None:
        """Wait while ``trainer`` works."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert trainer.poll() in (None, 0), trainer.communicate()[1][-4000:]
            assert time.monotonic() < deadline, trainer.pid
            time.sleep(0.01)

    def _keep_registered(self, ended: threading.Event) -> None:
        """Register the engine again and again, as a supervisor does with one that a trainer cut off."""
        while not ended.wait(5):
            command.call(self._workplace, "engine", "add", "runs/fenced", self.url, "--engine", "embedded")

    def lines(self, file: str, lineage: int) -> list[str]:
        """What the trainer of a lineage has written so far, in whole lines."""
        path = self.folder / file
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [line.decode() for line in whole if json.loads(line)["lineage"] == lineage]

    def saved(self) -> set[str]:
        return {path.name for path in list_checkpoints(self.folder / "checkpoints")}

    def _start(self, module: str, *arguments: str) -> Forked:
        process = Forked(f"rl_async.{module}", "--run", "runs/fenced", *arguments, cwd=self._workplace)
        self._exits.callback(lambda: print(module, process.communicate()[1][-4000:]))  # shown if the test fails
        self._exits.callback(process.kill)
        return process


@pytest.fixture
def run(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(workplace)
    with ExitStack() as exits:
        yield Run(workplace, exits)


@pytest.mark.timeout(500)
def test_trainers_that_thaw_beside_their_successor_change_nothing(run: Run, workplace: Path) -> None:
    frozen = [
        run.frozen_trainer(0, "trained.jsonl"),  # before it commits, perhaps while it writes a checkpoint
        run.frozen_trainer(1, "metrics.jsonl"),  # while it publishes
    ]
    successor = run.trainer()
    run.until(lambda: len(run.lines("metrics.jsonl", 2)) >= 2, successor)
    reported = [run.lines("metrics.jsonl", lineage) for lineage in (0, 1)]
    saved = {path: path.stat().st_mtime_ns for path in run.folder.glob("checkpoints/step-*/state.json")}
    for trainer in frozen:
        trainer.send_signal(signal.SIGCONT)
    run.until(lambda: None not in [trainer.poll() for trainer in frozen], successor)
    assert [trainer.returncode for trainer in frozen] == [EXIT_FAILED] * 2
    assert ["TrainerReplaced" in trainer.communicate()[1] for trainer in frozen] == [True] * 2

    run.until(lambda: successor.poll() is not None, successor)
    for lineage in (0, 1):  # each may still tell of a step that it had committed when it froze
        assert run.lines("metrics.jsonl", lineage)[:-1] in (reported[lineage], reported[lineage][:-1])
    assert {path: path.stat().st_mtime_ns for path in saved} == saved
    assert not [path for path in list_checkpoints(run.folder / "checkpoints") if damage_of(path)]
    assert problems(run.folder, EXPECTED) == []
    assert "ok: every admitted group was trained exactly once\n" in command.succeed(workplace, "audit", "runs/fenced")
    served = command.succeed(workplace, "engine", "list", "runs/fenced")
    assert re.search(rf"\b2\.{EXPECTED.steps}\b", served), served
