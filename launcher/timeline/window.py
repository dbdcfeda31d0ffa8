"""The part of a timeline that the page draws at once, of bounded size however long the run is and however many play."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_async.launcher.timeline.lanes import Lane, place, thinned
from rl_async.launcher.timeline.recorded import MOST, episodes, read_processes
from rl_async.process.run_files import Entered

NEWEST = 6  # steps that are shown at first
DETAILED = 24  # steps whose episodes are shown
LATER = 4  # steps behind a window, whose episodes may have begun within it
PIXELS = 2000  # into which a window is divided: nothing shorter is drawn alone


def window(run: Path, entered: Sequence[Entered], began: float | None, ended: float | None) -> dict[str, Any]:
    """Return the lanes between two times (Unix), by default around the newest steps. ``entered``: by its processes.

    Episodes are in it unless it has more than DETAILED steps. ``left_out`` counts their spans that are not.
    """
    timeline = read_processes(run, entered)
    known = sorted(timeline.steps)
    first = min((row[0].began for lane in timeline.lanes for row in lane.rows), default=timeline.until)
    newest = timeline.steps[known[-NEWEST:][0]][0] if known else first
    last = timeline.until if timeline.running or not known else timeline.steps[known[-1]][1]
    since, until = newest if began is None else began, last if ended is None else ended
    within = [step for step in known if timeline.steps[step][1] > since and timeline.steps[step][0] <= until]
    lanes = [_cut(lane, since, until) for lane in timeline.lanes]
    left = 0
    if within and len(within) <= DETAILED:
        wanted = [*within, *(step for step in known if within[-1] < step <= within[-1] + LATER)]
        played, left = episodes(run, wanted, MOST)
        lanes += [_cut(lane, since, until) for lane in played]
    return {
        "from": since,
        "to": until,
        "began": first,
        "until": timeline.until,
        "running": timeline.running,
        "steps": [[step, *timeline.steps[step]] for step in _spread(within)],
        "detailed": len(within) <= DETAILED,
        "left_out": left,
        "lanes": sorted((lane for lane in lanes if lane.rows), key=place),
    }


def _cut(lane: Lane, since: float, until: float) -> Lane:
    rows = [[span for span in row if span.ended > since and span.began <= until] for row in lane.rows]
    if len(rows) == 1:
        rows = [thinned(rows[0], (until - since) / PIXELS)]
    return Lane(lane.process, lane.title, [row for row in rows if row])


def _spread(steps: list[int]) -> list[int]:
    """Return at most PIXELS of the steps, evenly chosen."""
    return steps[:: max(1, -(-len(steps) // PIXELS))]
