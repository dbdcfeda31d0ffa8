"""A rank takes its rows, and none that changed on the way."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from rl_async import codec
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RowsChanged, RowsLost
from rl_async.messages import Done, NotReady, Reserved, Trajectory, TrajectoryHeader
from rl_async.trainer.batch_layout import RowCost
from rl_async.trainer.batches import QueueSource, agreed, take_batch
from rl_async.trainer.ranks import StopRequest, pure_data_parallel
from rl_async.trainer.records import Recorder
from rl_async.transfer_queue.conversations import announced_rows, parcel
from tests.conftest import make_rows

CONFIG = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="none"))


class Queue:
    """Reserves one batch, and gives the rows of each answer in turn; the last again and again."""

    def __init__(self, *answers: list[Trajectory] | RowsLost) -> None:
        self._answers = list(answers)

    def reserve(self, step: int, wait_s: float) -> Reserved | NotReady:
        return Reserved(
            step=step, headers=[parcel([row], None).headers[0] for row in make_rows(step, groups=1, samples=2)]
        )

    def fetch_announced(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, RowsLost):
            raise answer
        announced_rows(headers, list(map(codec.encode, answer)))
        return answer

    def commit(self, step: int) -> Done:
        return Done()

    def retire(self, step: int) -> Done:
        return Done()

    def snapshot(self) -> bytes:
        return b""

    def tighten(self, max_staleness: int) -> Done:
        return Done()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def take(queue: Queue, folder: Path) -> list[Trajectory]:
    source = QueueSource(queue, 1.0, Recorder(folder, 2, 0, is_recorder=False).refused)
    batch = take_batch(5, source, StopRequest(), CONFIG, pure_data_parallel(), RowCost(0, 0))
    assert batch is not None
    return list(batch.rows.values())


def test_rows_that_were_lost_are_asked_for_again(alone: None, tmp_path: Path) -> None:
    rows = make_rows(5, groups=1, samples=2)
    assert take(Queue(RowsLost("gone"), rows), tmp_path) == rows


def test_changed_rows_are_recorded_by_any_rank_and_never_trained(alone: None, tmp_path: Path) -> None:
    rows = make_rows(5, groups=1, samples=2)
    changed = msgspec.structs.replace(rows[1], token_ids=rows[1].token_ids + 1)
    with pytest.raises(RowsChanged):
        take(Queue([rows[0], changed]), tmp_path)
    (line,) = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    key = dict(zip(("group", "sample", "segment"), rows[1].key, strict=True))
    assert line == {"lineage": 2, "step": 5, "rank": 0, "tokens_hash": changed.tokens_hash()} | key


def test_ranks_go_on_only_if_no_row_of_any_changed(alone: None) -> None:
    headers = [row.header() for row in make_rows(0)]
    assert agreed(headers, intact=True, fetched=True) == (True, True)
    assert agreed(headers, intact=True, fetched=False) == (True, False)
    assert agreed(headers, intact=False, fetched=False)[0] is False
