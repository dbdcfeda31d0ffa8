"""Recorded episodes in the place of played ones: what is refused, and what is handed in."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.recorded import RecordedRunner, check_recording, needed_groups
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import RolloutConfig, TruncationConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import ConfigError
from rl_async.messages import LeasedGroup, Sampling, Trajectory, Turn, Version
from rl_async.recording import Recording, task_of, write_trajectories
from rl_async.trainer.records import append_trained
from tests.conftest import VOCAB, make_rows

STEPS, GROUPS, SAMPLES = 3, 2, 2


def record(run: Path, step: int, rows: Sequence[Trajectory]) -> None:
    write_trajectories(run / "trajectories" / f"step-{step:06d}-lineage0-rank0.jsonl.gz", rows)
    append_trained(run / "trained.jsonl", 0, step, rows)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    for step in range(STEPS):
        record(tmp_path, step, make_rows(step, GROUPS, SAMPLES))
    return tmp_path


def config(run: Path, steps: int = STEPS, groups: int = GROUPS, samples: int = SAMPLES) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none", train_batch_groups=groups),
        rollout=RolloutConfig(replay=str(run), group_size=samples),
        trainer=TrainerConfig(steps=steps),
    )


def leased(run: Path, place: int, group_id: int, attempt: int) -> LeasedGroup:
    task = task_of(Recording(run).groups[place])
    numbers = list(range(SAMPLES))
    return LeasedGroup(
        group_id=group_id, partition="train", attempt=attempt, samples=numbers, task=task, min_version=Version()
    )


def test_the_groups_of_a_run_are_the_first_that_were_trained(recorded: Path) -> None:
    assert [(group.step, group.group) for group in needed_groups(config(recorded, steps=2))] == [
        (0, 0), (0, 1), (1, 2), (1, 3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"steps": STEPS + 1}, "steps"),
        ({"groups": 3, "steps": 1}, "train_batch_groups"),
        ({"groups": 1, "steps": 1}, "train_batch_groups"),
        ({"samples": 4}, "group_size"),
    ],
)
def test_another_shape_than_the_runs_is_refused_and_names_the_key(
    recorded: Path, change: dict[str, int], key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.replay.*{key}"):
        needed_groups(config(recorded, **change))


async def test_rows_are_handed_in_as_they_were_under_the_names_of_this_run(recorded: Path) -> None:
    runner = RecordedRunner(config(recorded))
    before = next(row for row in make_rows(1, GROUPS, SAMPLES) if row.key == (3, 1, 0))
    (row,) = await runner.run(leased(recorded, 3, group_id=11, attempt=2), 1)
    assert (row.key, row.attempt, row.episode_id) == ((11, 1, 0), 2, "11.1.2")
    assert (row.task_id, row.reward, row.versions) == (before.task_id, before.reward, before.versions)
    assert np.array_equal(row.token_ids, before.token_ids) and row.logprobs.tobytes() == before.logprobs.tobytes()


def spoken(renderer: ChatRenderer, row: Trajectory, text: str, said: str) -> Trajectory:
    """Put an answer into a row; ``said``: its text according to the record."""
    ids = np.array([*renderer.encode("2+3?"), *renderer.encode(text), renderer.end_of_turn], np.int32)
    mask = np.arange(len(ids)) >= len(renderer.encode("2+3?"))
    turn = Turn(role="assistant", text=said, start=int(mask.argmax()), end=len(ids))
    return msgspec.structs.replace(
        row, token_ids=ids, loss_mask=mask, logprobs=np.zeros(len(ids), np.float32), turns=[turn]
    )


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, renderer: ChatRenderer) -> None:
    rows = make_rows(0, GROUPS, SAMPLES)
    record(tmp_path, 0, [spoken(renderer, row, "5", "5") for row in rows])
    check_recording(config(tmp_path, steps=1), renderer)
    record(tmp_path, 1, [spoken(renderer, row, "5", "five") for row in make_rows(1, GROUPS, SAMPLES)])
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_recording(config(tmp_path, steps=2), renderer)


def test_trajectories_that_lack_a_sample_are_refused(recorded: Path, renderer: ChatRenderer) -> None:
    rows = [row for row in make_rows(2, GROUPS, SAMPLES) if row.sample]
    write_trajectories(recorded / "trajectories" / "step-000002-lineage0-rank0.jsonl.gz", rows)
    check_recording(config(recorded, steps=2), None)
    with pytest.raises(ConfigError, match=r"rollout\.replay"):
        check_recording(config(recorded), None)


def test_trained_tokens_without_a_text_to_compare_are_refused(recorded: Path, renderer: ChatRenderer) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_recording(config(recorded), renderer)


def test_tokens_that_the_model_does_not_have_are_refused(recorded: Path) -> None:
    check_recording(config(recorded), None, VOCAB)
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_recording(config(recorded), None, 2)


def test_rows_of_another_truncation_are_refused(tmp_path: Path) -> None:
    """They were chosen from fewer tokens than this run's checks know of."""
    rows = make_rows(0, GROUPS, SAMPLES)
    for row in rows:
        row.sampling = Sampling(top_k=5)
        row.kept_tokens = row.token_ids[row.loss_mask][:, None]
    record(tmp_path, 0, rows)
    cut = config(tmp_path, steps=1)
    with pytest.raises(ConfigError, match=r"rollout\.replay.*rollout\.truncation"):
        check_recording(cut, None)
    rollout = msgspec.structs.replace(cut.rollout, truncation=TruncationConfig(top_k=5))
    check_recording(msgspec.structs.replace(cut, rollout=rollout), None, VOCAB)
    kept = rows[0].kept_tokens
    assert kept is not None
    rows[0].kept_tokens = np.append(kept, np.full_like(kept, VOCAB), 1)
    record(tmp_path, 0, rows)
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_recording(msgspec.structs.replace(cut, rollout=rollout), None, VOCAB)


def test_a_step_that_was_not_recorded_is_not_taken_for_another_number_of_groups(recorded: Path) -> None:
    lines = [line for line in (recorded / "trained.jsonl").read_text().splitlines(True) if '"step":1' not in line]
    (recorded / "trained.jsonl").write_text("".join(lines))
    with pytest.raises(ConfigError, match="step 1") as refusal:
        needed_groups(config(recorded, steps=2))
    assert "train_batch_groups" not in str(refusal.value)
