"""What the page draws at once: a part of the timeline, of bounded size, and the newest updates."""

import gzip
import time
from pathlib import Path

import msgspec

from rl_async.launcher.timeline import DETAILED, NEWEST_OF_PAGE, PIXELS, episodes, newest_updates, window
from rl_async.messages import Activity
from rl_async.process.run_files import TIMELINE_FOLDER, Entered, read_timeline
from rl_async.recording import write_trajectories
from tests.conftest import make_rows
from tests.support.recordings import make_run, write_step

BEGAN = 1_795_449_576.25


def recorded(folder: Path, steps: int, length: float = 10.0) -> Path:
    """A run that waited and trained in turns, half of each step."""
    run = make_run(folder / "run", steps=0)
    lines = []
    for step in range(steps):
        at = BEGAN + step * length
        for stage, offset in (("waiting for a batch", 0.0), ("training", length / 2)):
            lines.append(Entered(writer="trainer-0", lane="trainer-0", at=at + offset, stage=stage, step=step))
    lines.append(Entered(writer="trainer-0", lane="trainer-0", at=BEGAN + steps * length))
    (run / TIMELINE_FOLDER).mkdir()
    (run / TIMELINE_FOLDER / "trainer-0.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    return run


def play(run: Path, step: int, at: float) -> None:
    rows = make_rows(step)
    for row in rows:
        row.activities = [Activity("generate", "engine-0", at, 1.0), Activity("reward", "", at + 1.0, 0.5)]
    write_step(run, step, rows)


def test_it_begins_with_the_newest_steps_and_has_their_episodes(tmp_path: Path) -> None:
    run = recorded(tmp_path, 20)
    play(run, 19, BEGAN + 190.0)
    play(run, 3, BEGAN + 30.0)
    found = window(run, read_timeline(run), None, None)
    assert (found["from"], found["to"], found["running"]) == (BEGAN + 10 * (20 - NEWEST_OF_PAGE), BEGAN + 200.0, False)
    titles = [(lane.process, lane.title) for lane in found["lanes"]]
    assert titles == [("trainer-0", "phase"), ("engine-0", "generate"), ("agent workers", "rewards")]
    assert {span.step for lane in found["lanes"][1:] for row in lane.rows for span in row} == {19}
    assert [step for step, _, _ in found["steps"]] == list(range(20 - NEWEST_OF_PAGE, 20))


def test_episodes_that_train_later_are_in_the_window_in_which_they_played(tmp_path: Path) -> None:
    run = recorded(tmp_path, 20)
    play(run, 5, BEGAN + 42.0)
    lanes = window(run, read_timeline(run), BEGAN + 41.0, BEGAN + 44.0)["lanes"]
    assert ("engine-0", "generate") in [(lane.process, lane.title) for lane in lanes]
    assert all(lane.title == "phase" for lane in window(run, read_timeline(run), BEGAN + 51.0, BEGAN + 54.0)["lanes"])


def test_an_evaluation_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    file = run / "trajectories" / "eval-000000.jsonl.gz"
    for began in (10.0, 2000.0):
        (row,) = make_rows(0, groups=1, samples=1)
        row.partition, row.activities = "eval", [Activity("generate", "engine-0", began, 1.0)]
        write_trajectories(file, [row])
        (lane,), _ = episodes(run, [0])
        assert [span.began for span in lane.rows[0]] == [began]


def test_a_long_run_is_drawn_with_a_bounded_number_of_spans(tmp_path: Path) -> None:
    run = recorded(tmp_path, 20_000, length=2.0)
    play(run, 3, BEGAN)
    found = window(run, read_timeline(run), BEGAN, BEGAN + 40_000.0)
    (lane,) = found["lanes"]
    assert not found["detailed"] and len(found["steps"]) <= PIXELS and DETAILED < 20_000
    assert PIXELS / 4 < len(lane.rows[0]) <= 2 * PIXELS


def test_a_run_without_anything_has_no_lanes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert window(run, read_timeline(run), None, None)["lanes"] == []


def test_rows_of_before_activities_are_none(tmp_path: Path) -> None:
    run = recorded(tmp_path, 2)
    write_step(run, 0, make_rows(0))
    (file,) = (run / "trajectories").iterdir()
    lines = gzip.decompress(file.read_bytes()).replace(b'"activities"', b'"unknown"')
    file.write_bytes(gzip.compress(lines))
    assert [lane.title for lane in window(run, read_timeline(run), None, None)["lanes"]] == ["phase"]


def test_the_newest_update_of_an_engine_goes_through_stages() -> None:
    def entered(lane: str, at: float, stage: str, version: str, writer: str = "weights") -> Entered:
        return Entered(writer=writer, lane=lane, at=at, stage=stage, version=version)

    lines = [
        entered("engine-0", 1.0, "probe", "0.1"),
        entered("engine-1", 1.0, "probe", "0.1"),
        entered("engine-0", 2.0, "", "0.1"),
        entered("engine-1", 3.0, "", "0.1"),
        entered("engine-0", 4.0, "running", "", writer="launcher"),
        entered("engine-0", 5.0, "probe", "0.2"),
        entered("engine-0", 6.0, "update, bucket 1/2", "0.2"),
        entered("engine-1.1", time.time(), "pause", "0.2"),
    ]
    first, second = newest_updates(lines)
    assert (first.process, first.version, first.stage, first.began, first.ended) == (
        "engine-0",
        "0.2",
        "update, bucket 1/2",
        5.0,
        6.0,
    )
    assert (second.process, second.stage, second.began == second.ended) == ("engine-1", "pause", True)
