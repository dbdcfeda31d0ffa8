"""Compares fetched rows with what their producers announced to the queue when they put them."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from rl_async.errors import ProtocolError, RowsChanged, RowsLost
from rl_async.messages import Trajectory, TrajectoryHeader, codec
from rl_async.messages.codec import Frame
from rl_async.process.memory import no_collection

_decode_row = codec.decoder(Trajectory)


def decode_rows(frames: Sequence[Frame]) -> list[Trajectory]:
    """The trajectories of these frames, whose arrays are views of them. Raises ProtocolError if one is none."""
    with no_collection():
        return list(map(_decode_row, frames))


def announced_rows(headers: Sequence[TrajectoryHeader], frames: Sequence[Frame]) -> list[Trajectory]:
    """Decode the rows of these headers, after a comparison of their bytes with the hashes there.

    Raises RowsLost if a row is of a later attempt: the announced one was lost since, and the header with it. Raises
    RowsChanged, naming every row that differs and who kept it.
    """
    changed: dict[tuple[int, int, int], str] = {}
    texts: list[str] = []
    for header, frame in zip(headers, frames, strict=True):
        if xxh3_64_intdigest(frame) != header.payload_xxh3:
            name = f"group {header.group_id} sample {header.sample}"
            name += f" segment {header.segment}" * bool(header.segment)
            changed[header.key] = _tokens_hash(header, frame, name)
            by = f"payload shard {' or '.join(header.shards)}" if header.shards else "the queue"
            texts.append(f"{name}, from {by}")
    if changed:
        raise RowsChanged(
            f"rows came with other bytes than were put: {'; '.join(texts)}. Continue with --resume; if it happens "
            "again, check that host's memory and disk, and move RUN/queue.sqlite* and queue-payloads/ away",
            changed,
        )
    return decode_rows(frames)


def _tokens_hash(header: TrajectoryHeader, frame: Frame, name: str) -> str:
    """The hash of the tokens of a row that is not the announced one, or of its bytes if it is none at all."""
    try:
        row = _decode_row(frame)
    except ProtocolError:
        return xxh3_128_hexdigest(frame)
    if row.key == header.key and row.attempt > header.attempt:
        raise RowsLost(f"{name} was generated again since its batch was reserved")
    return row.tokens_hash()
