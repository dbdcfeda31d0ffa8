"""What a run that was asked to stop waits for, and what ending it at once would lose."""

import signal
import time
from pathlib import Path

from rl_async.launcher.folder.run_folder import saved
from rl_async.launcher.folder.tail import last_record
from rl_async.process.run_files import Beat, read_beats

NOT_IN_A_STEP = ("starting", "waiting for a batch")


class StopNotice:
    """Renders the notice for the run in ``folder``; make it before the run is started."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.time()

    def text(self, number: int) -> str:
        """Render what happens on the signal ``number``."""
        beats = [beat for beat in read_beats(self._folder) if beat.since >= self._began]  # not of an earlier start
        return describe_stop(
            beats[0] if beats else None,
            last_record(self._folder / "metrics.jsonl").get("time/train_s"),
            saved(self._folder),
            time.time(),
            "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C",
        )


def describe_stop(beat: Beat | None, train_s: float | None, saved: int, now: float, key: str) -> str:
    """Describe the end of a run whose trainer does what ``beat`` says, and whose last step trained for ``train_s``.

    ``saved`` counts the steps in the newest checkpoint; ``key`` ends the run at once.
    """
    completed = 0 if beat is None else beat.step if beat.phase in NOT_IN_A_STEP else beat.step + 1
    if beat is None or beat.phase == "starting" or completed == 0:
        return "stopping; no step has begun"
    last = completed - 1
    if completed <= saved:
        return f"stopping; step {last} is saved"
    left = ""
    if beat.phase == "training" and train_s is not None:
        left = f", about {max(0.0, train_s - (now - beat.since)):.0f} s"
    lost = f"{completed - saved} step" if completed == saved + 1 else f"{completed - saved} steps"
    return f"stopping after step {last}{left}, and saving; {key} ends now, losing {lost}"
