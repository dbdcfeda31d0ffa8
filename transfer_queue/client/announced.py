"""Compares fetched rows with what their producers announced to the queue when they put them."""

from collections.abc import Sequence

from rl_async.errors import RowsChanged, RowsLost
from rl_async.messages import Trajectory, TrajectoryHeader


def check_announced(headers: Sequence[TrajectoryHeader], rows: Sequence[Trajectory]) -> None:
    """Compare each row with its header, by name and by the hash of its token ids.

    Raises RowsLost if a row is of a later attempt: the announced one was lost since, and the header with it. Raises
    RowsChanged, naming every row that differs and who kept it.
    """
    changed: dict[tuple[int, int, int], str] = {}
    texts: list[str] = []
    for header, row in zip(headers, rows, strict=True):
        name = f"group {header.group_id} sample {header.sample}" + (f" segment {header.segment}" * bool(header.segment))
        if row.key == header.key and row.attempt > header.attempt:
            raise RowsLost(f"{name} was generated again since its batch was reserved")
        if row.key != header.key or row.tokens_sha256() != header.tokens_sha256:
            changed[header.key] = row.tokens_sha256()
            by = f"payload shard {' or '.join(header.shards)}" if header.shards else "the queue"
            texts.append(f"{name}, from {by}")
    if changed:
        raise RowsChanged(
            f"rows came with other tokens than were put: {'; '.join(texts)}. Continue with --resume; if it happens "
            "again, check that host's memory and disk, and move RUN/queue.sqlite* and queue-payloads/ away",
            changed,
        )
