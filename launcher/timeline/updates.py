"""The newest update of each engine's weights, for the drawing of the loop. Pure."""

from collections.abc import Iterable

import msgspec

from rl_async.launcher.timeline.lanes import WEIGHTS, process_of
from rl_async.process.run_files import Entered


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """The newest update of one engine's weights."""

    process: str
    version: str
    stage: str  # what it is at; empty: it is over
    began: float  # Unix time
    ended: float  # of the last thing known of it


def newest_updates(entered: Iterable[Entered]) -> list[Update]:
    """Return the newest update of each engine, by its process, from what was entered, oldest first."""
    newest: dict[str, Update] = {}
    for one in entered:
        if one.writer != WEIGHTS:
            continue
        process = process_of(one.lane)
        before = newest.get(process)
        goes_on = before is not None and before.stage and before.version == one.version
        began = before.began if before is not None and goes_on else one.at
        newest[process] = Update(process=process, version=one.version, stage=one.stage, began=began, ended=one.at)
    return [newest[process] for process in sorted(newest)]
