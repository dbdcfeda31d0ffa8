"""Replaying recorded batches, an interrupted and an undisturbed trainer end with identical weights."""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from torch import Tensor

from rl_async.configs.load import dump
from rl_async.configs.schema.algorithm import AlgorithmConfig, CriticConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import DebugConfig, RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.insight.timeline import DETAILED
from rl_async.messages import Activity
from rl_async.process.run_files import TIMELINE_FOLDER, Entered
from rl_async.recording import write_trajectories
from rl_async.trainer.checkpoints import list_checkpoints
from tests.conftest import make_rows
from tests.e2e.browser import Tab
from tests.e2e.small_runs import HARDLY_WARM, call, succeed
from tests.support.forked import Forked
from tests.support.recordings import conversation, make_run, write_step

pytestmark = pytest.mark.e2e

STEPS = 6


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with recorded trajectories of STEPS steps."""
    folder = tmp_path_factory.mktemp("recorded")
    for step in range(STEPS):
        write_trajectories(folder / "trajectories" / f"step-{step:06d}-lineage0-rank0.jsonl.gz", make_rows(step))
    return folder


def start(
    folder: Path,
    recorded: Path,
    model: Path,
    *more: str,
    critic: CriticConfig | None = None,
    advantage: str = "grpo",
    min_train_s: float = 0.0,
    **options: Any,
) -> Forked:
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage=advantage),
        critic=critic,
        trainer=TrainerConfig(learning_rate=1e-3, steps=STEPS, checkpoint_every=2, **options),
        debug=DebugConfig(min_train_s=min_train_s),
    )
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    return Forked("rl_async.trainer", "--run", str(folder), "--replay", str(recorded), *more)


def finish(trainer: Forked) -> None:
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, errors[-3000:]


@pytest.fixture(scope="module")
def plain(recorded: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a critic that nobody disturbed."""
    folder = tmp_path_factory.mktemp("plain")
    finish(start(folder, recorded, model_folder))
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Hash of every file's tensors in the last checkpoint; their order in a file means nothing."""
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    return {str(path.relative_to(last)): digest_of(load_file(path)) for path in sorted(last.rglob("*.safetensors"))}


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Of names and bytes."""
    sums = hashlib.sha256()
    for name in sorted(tensors):
        sums.update(name.encode() + tensors[name].numpy().tobytes())
    return sums.hexdigest()


SHARD = "shards/shard-00001-model-00001-of-00001.safetensors"
POLICY = {"model/model.safetensors", SHARD, "random-rank0.safetensors"}
CRITICS = {
    "none": ("grpo", None, set()),
    "own": (  # the checkpoint that is resumed from is of a step in which the policy had not begun to train
        "gae",
        CriticConfig(learning_rate=1e-3, warmup_steps=3),
        {f"critic/{name}" for name in ("model/model.safetensors", SHARD, "value_head.safetensors")},
    ),
    "shared": ("gae", CriticConfig(shared=True), {"value_head.safetensors"}),
    "process": (
        "prime",
        CriticConfig(learning_rate=1e-3),
        {f"critic/{name}" for name in ("model/model.safetensors", SHARD)},
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "none" else pytest.mark.slow) for kind in CRITICS]
)
def test_kill_and_resume_ends_with_identical_weights(
    recorded: Path, model_folder: Path, tmp_path: Path, plain: Path, kind: str
) -> None:
    advantage, critic, files = CRITICS[kind]
    undisturbed, interrupted = tmp_path / "a", tmp_path / "b"
    if critic is None:
        undisturbed = plain
    else:
        finish(start(undisturbed, recorded, model_folder, critic=critic, advantage=advantage))

    victim = start(interrupted, recorded, model_folder, critic=critic, advantage=advantage, min_train_s=0.3)
    deadline = time.monotonic() + 120
    metrics = interrupted / "metrics.jsonl"
    saved = interrupted / "checkpoints" / "step-000002"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3 or not saved.exists():
        assert time.monotonic() < deadline and victim.poll() is None
        time.sleep(0.02)
    victim.kill()  # three steps are done, the checkpoint is of two
    victim.communicate()
    finish(start(interrupted, recorded, model_folder, "--resume", critic=critic, advantage=advantage))

    assert digests(interrupted) == digests(undisturbed)
    assert digests(undisturbed).keys() == POLICY | files
    steps = [(m["lineage"], m["step"]) for m in map(json.loads, metrics.read_text().splitlines())]
    assert steps[-4:] == [(1, 2), (1, 3), (1, 4), (1, 5)]


def test_killed_while_a_checkpoint_is_being_written(
    recorded: Path, model_folder: Path, tmp_path: Path, plain: Path
) -> None:
    interrupted = tmp_path / "b"
    checkpoints = interrupted / "checkpoints"
    victim = start(interrupted, recorded, model_folder, min_train_s=1.0)
    deadline = time.monotonic() + 120
    while not (checkpoints / ".step-000004.lineage0.tmp").exists():
        assert time.monotonic() < deadline and victim.poll() is None
        time.sleep(0.001)
    victim.kill()
    victim.communicate()
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step-000002"]
    finish(start(interrupted, recorded, model_folder, "--resume"))
    assert digests(interrupted) == digests(plain)
    kept = ["step-000002", "step-000004", "step-000006"]  # the two newest, and the one that was resumed from
    assert sorted(path.name for path in checkpoints.iterdir()) == kept


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    recorded: Path, model_folder: Path, tmp_path: Path, plain: Path
) -> None:
    expected = digests(plain)
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "checkpoints" / "step-000006" / SHARD
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = start(tmp_path, recorded, model_folder, "--resume")
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors[-3000:]
    assert f"{damaged} has" in errors and "resuming at step 4" in errors
    assert digests(tmp_path) == expected
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / SHARD).unlink()
    last = start(tmp_path, recorded, model_folder, "--resume")
    _, errors = last.communicate(timeout=120)
    assert last.returncode == 2, errors[-3000:]
    assert f"{damaged} is missing" in errors and "Traceback" not in errors


def test_a_missing_batch_is_one_clear_error(recorded: Path, model_folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    trainer = start(tmp_path / "run", empty, model_folder)
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 2
    assert "has no recorded batch of step 0" in errors
    assert "Traceback" not in errors


# A run over the record of another trains the same rows to the same numbers, without an engine.

TRAINED_AGAIN_STEPS = 3
SMALL = [
    *(
        "data.train_batch_groups=2",
        "rollout.group_size=4",
        f"trainer.steps={TRAINED_AGAIN_STEPS}",
        "trainer.checkpoint_every=2",
    ),
    *("eval.every=0", "eval.tasks=4", "queue.max_staleness=1", *HARDLY_WARM),
]
OTHERWISE = (  # metrics of what is not trained: times, places, and what engines and tools did meanwhile
    *("time", "sync", "tokens/per_s", "queue", "eval", "mismatch", "memory", "engine"),
    *("compute/tflops", "compute/mfu", "batch/bytes"),
)


def launch(home: Path, name: str, *more: str) -> None:
    succeed(home, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", name, *SMALL, *more)


def lines(home: Path, name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "runs" / name / file).read_text().splitlines()]


def trained(home: Path, name: str) -> list[tuple[int, int, str]]:
    return [(row["step"], row["sample"], row["tokens_hash"]) for row in lines(home, name, "trained.jsonl")]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_is_trained_again_bit_by_bit(workplace: Path) -> None:
    launch(workplace, "before")
    # It publishes less often than the run before it: no engine is there to need the weights.
    launch(workplace, "again", "rollout.replay=runs/before", "weight_sync.every=2")
    assert trained(workplace, "again") == trained(workplace, "before")
    for then, now in zip(
        lines(workplace, "before", "metrics.jsonl"), lines(workplace, "again", "metrics.jsonl"), strict=True
    ):
        same = {key for key in then if not key.startswith(OTHERWISE)}
        assert {"loss/policy", "loss/grad_norm", "correction/kl", "reward/mean", "staleness/max"} <= same
        assert {key: then[key] for key in same} == {key: now.get(key) for key in same}
    assert "exactly once" in succeed(workplace, "audit", "runs/again")
    started = {process["name"] for process in json.loads((workplace / "runs" / "again" / "processes.json").read_text())}
    assert started == {"queue", "worker-0", "trainer-0"}
    refused = call(
        workplace, "launch", "--config", "calculator", *SMALL, "rollout.replay=runs/before", "trainer.steps=9"
    )
    assert refused.returncode == 2 and "rollout.replay" in refused.stderr


# Pages on a recorded run in Chromium: a chosen episode that is no longer drawn, a tool without a name, and engines
# behind the newest weights.

RECORDED_PAGES_STEPS, STEP_S, BEGAN = DETAILED + 6, 10.0, 1_700_000_000.0
TRAINER_Y, EPISODE_Y = 45, 82  # within the canvas: the first lane is the trainer's, the second the episode's


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a run that has more steps than are shown with episodes; one episode of the last step is recorded, and
    it called a tool without a name."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run", steps=0)
    entered = [
        Entered(writer="trainer-0", lane="trainer-0", at=BEGAN + (step + half / 2) * STEP_S, stage=stage, step=step)
        for step in range(RECORDED_PAGES_STEPS)
        for half, stage in enumerate(("waiting for a batch", "training"))
    ]
    entered.append(Entered(writer="trainer-0", lane="trainer-0", at=BEGAN + RECORDED_PAGES_STEPS * STEP_S))
    (run / TIMELINE_FOLDER).mkdir()
    (run / TIMELINE_FOLDER / "trainer-0.jsonl").write_bytes(
        b"".join(msgspec.json.encode(one) + b"\n" for one in entered)
    )
    (row,) = make_rows(RECORDED_PAGES_STEPS - 1, groups=1, samples=1)
    row.turns = conversation("question", "answer", tool="", error="no_such_tool")
    row.activities = [Activity("generate", "engine-0", BEGAN + (RECORDED_PAGES_STEPS - 1) * STEP_S, STEP_S / 2)]
    write_step(run, RECORDED_PAGES_STEPS - 1, [row])
    command = [sys.executable, "-m", "rl_async.launcher.cli", "view", str(run.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Tab]:
    made = Tab(browser, address)
    yield made
    made.close()


def diagnosed(tab: Tab, updates: list[dict[str, Any]], seen: dict[str, Any]) -> None:
    """Answer what doctor would see: the recorded run has no processes that could be observed."""
    nothing = {"processes": [], "ranks": [], "queue": None, "engines": [], "trouble": [], "launcher": None}
    observation = {
        **nothing,
        "steps": RECORDED_PAGES_STEPS,
        "steps_done": RECORDED_PAGES_STEPS,
        "usual_step_s": None,
        **seen,
    }
    verdict = {"health": "over", "findings": [], "waits": []}
    told = {"at": BEGAN, "updates": updates, "verdict": verdict, "observation": observation}
    tab.page.route("**/diagnosis", lambda route: route.fulfill(json=told))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_chosen_episode_may_leave_what_is_drawn(tab: Tab) -> None:
    diagnosed(tab, [], {})
    page = tab.open("/flow/run")
    canvas = page.locator(".timeline canvas[aria-label*='engine-0 generate: ']")
    canvas.wait_for()
    from_the_left = 5.25 / 6  # of the newest six steps, when the episode played
    canvas.click(position={"x": from_the_left * canvas.bounding_box()["width"], "y": EPISODE_Y})
    story = page.locator(".span-story")
    story.get_by_role("link", name="trajectory").wait_for()
    page.keyboard.press("0")
    page.get_by_text("appear when you zoom in").wait_for()
    canvas = page.locator(".timeline canvas")
    canvas.click(position={"x": 1.75 / RECORDED_PAGES_STEPS * canvas.bounding_box()["width"], "y": TRAINER_Y})
    story.get_by_text("step 1", exact=True).wait_for()  # in the steps that are drawn now, rather than before


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_calls_that_could_not_be_parsed_are_found(tab: Tab) -> None:
    page = tab.open("/trajectories/run?source=none")
    page.locator("p", has_text="0 trajectories").wait_for()
    page.locator("details.usage summary", has_text="1 failed").click()
    page.locator("details.usage tr").get_by_role("link", name="(not parsed)").click()
    page.locator("p", has_text="1 trajectories").wait_for()
    assert page.get_by_label("call not parsed").is_checked()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_engine_is_behind_in_steps_of_its_own_lineage_alone(tab: Tab) -> None:
    versions = {"engine-0": "1.6", "engine-1": "1.4", "engine-2": "0.10"}

    updates = [{"process": "engine-0", "version": "1.6", "stage": "", "began": BEGAN, "ended": BEGAN}]
    engines = [
        {"engine_id": f"{name}.0", "url": "", "answers": True, "version": version, "paused": False, "requests": 0}
        for name, version in versions.items()
    ]
    diagnosed(tab, updates, {"launcher": 1, "engines": engines})
    page = tab.open("/flow/run")
    shown = [page.locator(f"[data-engine='{name}'] .version") for name in versions]
    said = [engine.inner_text().partition(versions[name])[2] for name, engine in zip(versions, shown, strict=True)]
    assert said == ["", ", 2 behind", ", of an older lineage"]
