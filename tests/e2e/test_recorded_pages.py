"""Pages on a recorded run in Chromium: a chosen episode that is no longer drawn, a tool without a name, and engines
behind the newest weights."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rl_async.insight.timeline import DETAILED
from rl_async.messages import Activity
from rl_async.process.run_files import TIMELINE_FOLDER, Entered
from tests.conftest import make_rows
from tests.e2e.browser import Tab
from tests.support.recordings import conversation, make_run, write_step

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]
STEPS, STEP_S, BEGAN = DETAILED + 6, 10.0, 1_700_000_000.0
TRAINER_Y, EPISODE_Y = 45, 82  # within the canvas: the first lane is the trainer's, the second the episode's


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a run that has more steps than are shown with episodes; one episode of the last step is recorded, and
    it called a tool without a name."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run", steps=0)
    entered = [
        Entered(writer="trainer-0", lane="trainer-0", at=BEGAN + (step + half / 2) * STEP_S, stage=stage, step=step)
        for step in range(STEPS)
        for half, stage in enumerate(("waiting for a batch", "training"))
    ]
    entered.append(Entered(writer="trainer-0", lane="trainer-0", at=BEGAN + STEPS * STEP_S))
    (run / TIMELINE_FOLDER).mkdir()
    (run / TIMELINE_FOLDER / "trainer-0.jsonl").write_bytes(
        b"".join(msgspec.json.encode(one) + b"\n" for one in entered)
    )
    (row,) = make_rows(STEPS - 1, groups=1, samples=1)
    row.turns = conversation("question", "answer", tool="", error="no_such_tool")
    row.activities = [Activity("generate", "engine-0", BEGAN + (STEPS - 1) * STEP_S, STEP_S / 2)]
    write_step(run, STEPS - 1, [row])
    command = [sys.executable, "-m", "rl_async.launcher.cli", "view", str(run.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Tab]:
    made = Tab(browser, address)
    yield made
    made.close()


def diagnosed(tab: Tab, updates: list[dict[str, Any]], seen: dict[str, Any]) -> None:
    """Answer what doctor would see: the recorded run has no processes that could be observed."""
    nothing = {"processes": [], "ranks": [], "queue": None, "engines": [], "trouble": [], "launcher": None}
    observation = {**nothing, "steps": STEPS, "steps_done": STEPS, "usual_step_s": None, **seen}
    verdict = {"health": "over", "findings": [], "waits": []}
    told = {"at": BEGAN, "updates": updates, "verdict": verdict, "observation": observation}
    tab.page.route("**/diagnosis", lambda route: route.fulfill(json=told))


def test_a_chosen_episode_may_leave_what_is_drawn(tab: Tab) -> None:
    diagnosed(tab, [], {})
    page = tab.open("/flow/run")
    canvas = page.locator(".timeline canvas[aria-label*='engine-0 generate: ']")
    canvas.wait_for()
    from_the_left = 5.25 / 6  # of the newest six steps, when the episode played
    canvas.click(position={"x": from_the_left * canvas.bounding_box()["width"], "y": EPISODE_Y})
    story = page.locator(".span-story")
    story.get_by_role("link", name="trajectory").wait_for()
    page.keyboard.press("0")
    page.get_by_text("appear when you zoom in").wait_for()
    canvas = page.locator(".timeline canvas")
    canvas.click(position={"x": 1.75 / STEPS * canvas.bounding_box()["width"], "y": TRAINER_Y})
    story.get_by_text("step 1", exact=True).wait_for()  # in the steps that are drawn now, rather than before


def test_calls_that_could_not_be_parsed_are_found(tab: Tab) -> None:
    page = tab.open("/trajectories/run?source=none")
    page.locator("p", has_text="0 trajectories").wait_for()
    page.locator("details.usage summary", has_text="1 failed").click()
    page.locator("details.usage tr").get_by_role("link", name="(not parsed)").click()
    page.locator("p", has_text="1 trajectories").wait_for()
    assert page.get_by_label("call not parsed").is_checked()


def test_an_engine_is_behind_in_steps_of_its_own_lineage_alone(tab: Tab) -> None:
    versions = {"engine-0": "1.6", "engine-1": "1.4", "engine-2": "0.10"}

    updates = [{"process": "engine-0", "version": "1.6", "stage": "", "began": BEGAN, "ended": BEGAN}]
    engines = [
        {"engine_id": f"{name}.0", "url": "", "answers": True, "version": version, "paused": False, "requests": 0}
        for name, version in versions.items()
    ]
    diagnosed(tab, updates, {"launcher": 1, "engines": engines})
    page = tab.open("/flow/run")
    shown = [page.locator(f"[data-engine='{name}'] .version") for name in versions]
    said = [engine.inner_text().partition(versions[name])[2] for name, engine in zip(versions, shown, strict=True)]
    assert said == ["", ", 2 behind", ", of an older lineage"]
