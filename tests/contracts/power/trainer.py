"""What a trainer keeps in a run folder, without a model: ``python -m tests.contracts.power.trainer ROOT``.

It makes the run folder, records what it trains, and saves after each second step. Halfway through it is started again.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rl_async.configs.load import load_resolved
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.files import drop_torn_lines
from rl_async.launcher.run_folder import create
from rl_async.messages import Sampling, Trajectory, Version, VersionRun
from rl_async.recording import TrainedRow, read_trajectories, write_trajectories
from rl_async.trainer.checkpoints import FORMAT, CheckpointState, Saver, drop_unfinished, newest_whole, read_state
from rl_async.trainer.records import append_trained, next_lineage
from tests.support.power.cuts import mark

CONFIG = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), name="run")
RUN = "runs/run"
WAIT_S = 60.0
STEPS = 4


class Promised(msgspec.Struct):
    """What was acknowledged: a lineage taken, a step told to the queue as trained, a checkpoint as durable."""

    lineage: int
    trained: int = -1
    checkpoint: int = -1


def rows_of(step: int) -> list[Trajectory]:
    """Rows of a batch, which take more than a page."""
    draw = np.random.default_rng(step)
    return [
        Trajectory(
            task_id="t",
            group_id=step,
            sample=sample,
            attempt=0,
            episode_id="e",
            token_ids=draw.integers(0, 1000, 200).astype(np.int32),
            loss_mask=np.ones(200, dtype=bool),
            logprobs=draw.standard_normal(200).astype(np.float32),
            versions=[VersionRun(Version(0, step), 0, 200)],
            sampling=Sampling(),
            reward=1.0,
        )
        for sample in range(16)
    ]


def weights(step: int, lineage: int) -> torch.Tensor:
    return torch.arange(3000) + 1000 * step + lineage


class Weights:
    """A backend that saves some pages."""

    def __init__(self, step: int, lineage: int) -> None:
        self._weights = weights(step, lineage)

    def stage(self, folder: Path, group: object) -> Callable[[], None]:
        return lambda: save_file({"weights": self._weights}, folder / "weights.safetensors")


def promise(**values: int) -> None:
    mark(msgspec.json.encode(Promised(**values)).decode())


def main(root: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = root / RUN
    create(CONFIG, run)
    train(run, 0, STEPS, resuming=False)
    train(run, 2, STEPS + 2, resuming=True)  # as if the newest had not been there yet, so that it is replaced
    dist.destroy_process_group()


def train(run: Path, start: int, end: int, *, resuming: bool) -> None:
    lineage = next_lineage(run, resuming)
    promise(lineage=lineage)
    if resuming:
        promise(lineage=0, checkpoint=start)  # and none after it
    saver = Saver(run / "checkpoints", 2, WAIT_S, resumed=start)
    for step in range(start, end):
        rows = rows_of(step)
        write_trajectories(run / "trajectories" / name(step, lineage), rows)
        append_trained(run / "trained.jsonl", lineage, step, rows)
        promise(lineage=lineage, trained=step)
        if step % 2:
            state = CheckpointState(step=step + 1, lineage=lineage, kl_coef=0.0, format=FORMAT)
            saver.save({".": Weights(step + 1, lineage)}, state, b"queue")  # type: ignore[dict-item]
            saver.wait()
            assert saver.durable() == step + 1
            promise(lineage=lineage, checkpoint=step + 1)


def name(step: int, lineage: int) -> str:
    return f"step-{step:06d}-lineage{lineage}-rank0.jsonl.gz"


def check(folder: Path, marks: list[str]) -> None:
    """Raise what a resumed trainer raises on ``folder``, and AssertionError for what was promised and is lost."""
    promises = [msgspec.json.decode(text, type=Promised) for text in marks]
    run, root = folder / RUN, folder / RUN / "checkpoints"
    if not promises:
        return
    assert load_resolved(run / "config.yaml") == CONFIG
    drop_unfinished(root)
    newest = newest_whole(root)
    saved = [(p.lineage, p.checkpoint) for p in promises if p.checkpoint >= 0]
    if saved:
        assert newest is not None, "no checkpoint"
        state = read_state(newest)
        assert (state.lineage, state.step) >= saved[-1], f"{state} and not {saved[-1]}"
        assert torch.equal(load_file(newest / "weights.safetensors")["weights"], weights(state.step, state.lineage))
        for step in range(state.step):
            rows = read_trajectories(run / "trajectories" / name(step, state.lineage if step >= 2 else 0))
            assert [row.tokens_hash() for row in rows] == [row.tokens_hash() for row in rows_of(step)]
    path = run / "trained.jsonl"
    drop_torn_lines(path)
    lines = path.read_bytes().splitlines() if path.exists() else []
    trained = [msgspec.json.decode(line, type=TrainedRow) for line in lines]
    assert {(p.lineage, p.trained) for p in promises if p.trained >= 0} <= {(row.lineage, row.step) for row in trained}
    assert next_lineage(run, resuming=True) > max(p.lineage for p in promises)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
