"""Two trainer ranks: a lost one ends the other with a clear message; asked to stop, both save and end well."""

import importlib.util
import json
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import DebugConfig, RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.recording import write_trajectories
from rl_async.trainer.checkpoints import damage_of, list_checkpoints, read_state
from tests.conftest import make_rows
from tests.e2e.small_runs import APART, HARDLY_WARM, succeed
from tests.support.forked import Forked, start_ranks

pytestmark = pytest.mark.e2e

STEPS = 40


def start(folder: Path, model: Path, *more: str) -> list[Forked]:
    """Both ranks, training on recorded rows for longer than the test lasts."""
    for step in range(STEPS):
        write_trajectories(folder / "trajectories" / f"step-{step:06d}-lineage0-rank0.jsonl.gz", make_rows(step))
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(ranks=2, steps=STEPS, collective_timeout_s=15),
        debug=DebugConfig(min_train_s=0.5),
    )
    (folder / "config.yaml").write_text(dump(config))
    return start_ranks("rl_async.trainer", "--run", str(folder), "--replay", str(folder), *more, ranks=2)


def wait_for_step(folder: Path, ranks: list[Forked], lines: int) -> None:
    """Until so many steps are in the metrics."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks)
        time.sleep(0.05)


@pytest.mark.parametrize("told", [(0, 1), pytest.param((1,), marks=pytest.mark.slow)])
def test_sigterm_saves_the_step_and_ends_with_143(model_folder: Path, tmp_path: Path, told: tuple[int, ...]) -> None:
    ranks = start(tmp_path, model_folder)
    try:
        wait_for_step(tmp_path, ranks, 2)
        for rank in told:
            ranks[rank].send_signal(signal.SIGTERM)
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [143, 143], errors
        (saved,) = list_checkpoints(tmp_path / "checkpoints")
        trained = {json.loads(line)["step"] for line in (tmp_path / "trained.jsonl").read_text().splitlines()}
        assert read_state(saved).step == len(trained) >= 2, "what was trained was saved"
        assert damage_of(saved) is None
        reported = (tmp_path / "metrics.jsonl").read_text().count("\n")
        ranks += start(tmp_path, model_folder, "--resume")
        wait_for_step(tmp_path, ranks[2:], reported + 1)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
        assert [(line["lineage"], line["step"]) for line in lines][reported] == (1, len(trained))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_other(model_folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    ranks = start(tmp_path, model_folder)
    try:
        wait_for_step(tmp_path, ranks, 1)
        ranks[1].send_signal(how)
        _, errors = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 1, errors[-3000:]
        assert "rank 0 lost the other ranks" in errors
        assert "Traceback" not in errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


# Whole runs that train adapters, stopped half way and gone on with: engines get merged weights, or the adapters alone,
# which they add to the base or load beside it.

SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    "trainer.ranks=2",
    "trainer.learning_rate=1e-3",
    "trainer.activation_checkpointing=true",
    "trainer.lora={rank: 4, targets: [q_proj, down_proj]}",
    "trainer.checkpoint_hf=false",
    "algorithm.entropy_coef=0.01",  # so that there is a gradient, whatever the rewards
    "eval.every=0",
    "eval.tasks=4",
    *HARDLY_WARM,
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="PEFT is not here; install it with pip install 'rl-async[lora]'",
)
@pytest.mark.parametrize(
    ("mode", "sync"),
    [("disaggregated", "way=delta"), ("colocated", "adapters=add"), ("disaggregated", "adapters=auto")],
)
def test_a_run_of_adapters_goes_on_and_is_exported_whole(workplace: Path, mode: str, sync: str) -> None:
    launch = ["launch", "--mode", mode, "--config", "calculator", "--name", "run", *SMALL, f"weight_sync.{sync}"]
    succeed(workplace, *launch, "trainer.steps=2")
    succeed(workplace, *launch, "trainer.steps=3", "--resume")
    run = workplace / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["loss/grad_norm"] > 0 for row in rows)
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) <= APART, "engines got other weights"
    succeed(workplace, "export", "runs/run", "out")
    adapter = load_file(run / "checkpoints" / "step-000003" / "adapter" / "adapter_model.safetensors")
    if "adapters" in sync:
        assert {row["sync/bytes"] for row in rows} == {sum(tensor.nbytes for tensor in adapter.values())}
    succeed(workplace, "export", "runs/run", "apart", "--adapter")
    apart = load_file(workplace / "apart" / "adapter_model.safetensors")
    assert apart.keys() == adapter.keys() and all(apart[name].equal(adapter[name]) for name in adapter)
    path = json.loads((run / "checkpoints" / "step-000003" / "adapter" / "base.json").read_text())["path"]
    base, merged = load_file(Path(path) / "model.safetensors"), load_file(workplace / "out" / "model.safetensors")
    changed = {name.rpartition(".layers.")[2].split(".", 1)[-1] for name in base if not base[name].equal(merged[name])}
    assert changed == {"self_attn.q_proj.weight", "mlp.down_proj.weight"}
