"""The page beside a run (``tracking.view``), in Chromium: curves and timeline grow while it trains, an engine that is
killed is seen gone and back, stacks are asked for by the user alone, and the page ends with the run."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from rl_async.insight.timeline import write_trace
from tests.e2e.browser import SIZES, Tab
from tests.e2e.small_runs import HARDLY_WARM

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "rollout.engines=2", "trainer.steps=100000"),
    *("debug.min_train_s=1", "eval.every=0", "eval.tasks=2", "tracking.view=true", "launcher.stop_timeout_s=5"),
    *HARDLY_WARM,
]


class Live(NamedTuple):
    launcher: "subprocess.Popen[str]"
    folder: Path
    address: str


@pytest.fixture(scope="module")
def live(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A run that trains until it is stopped."""
    home = tmp_path_factory.mktemp("flow")
    shutil.copytree(artifacts, home / "artifacts")
    command = [sys.executable, "-m", "rl_async.launcher.cli", "launch", "--config", "calculator", "--name", "live"]
    log = home / "launch.log"
    with log.open("w") as output:
        process = subprocess.Popen([*command, *SMALL], cwd=home, stdout=output, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 240
    while "page: " not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.1)
    yield Live(process, home / "runs" / "live", log.read_text().partition("page: ")[2].split()[0])
    if process.poll() is None:
        process.kill()  # its children end with it
        process.wait()


@pytest.fixture
def tab(browser: Any, live: Live) -> Iterator[Tab]:
    made = Tab(browser, live.address)
    made.page.set_default_timeout(120_000)
    yield made
    made.close()


def stacks(run: Path) -> int:
    return sum(file.stat().st_size for file in (run / "stacks").iterdir())


def test_the_timeline_grows_and_no_process_is_disturbed(tab: Tab, live: Live) -> None:
    page = tab.open("/flow/live")
    canvas = page.locator(".timeline canvas")
    page.locator(".timeline canvas[aria-label*='engine-1 generate: ']").wait_for()
    page.keyboard.press("0")
    before, pixels, deadline = int(canvas.get_attribute("data-spans")), canvas.screenshot(), time.monotonic() + 240
    while int(canvas.get_attribute("data-spans")) < before + 20 or canvas.screenshot() == pixels:
        assert time.monotonic() < deadline
        page.keyboard.press("0")  # the whole run is longer by now; it is drawn a frame later than the attribute says
        page.wait_for_timeout(500)
    said = canvas.get_attribute("aria-label")
    for words in ("trainer-0 train: ", "trainer-0 wait: ", "engine-0 weights: ", "engine-1 generate: ", "reward: "):
        assert words in said
    write_trace(live.folder, live.folder / "trace.json", None)
    events = json.loads((live.folder / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "f" for event in events) >= 4, "episodes flow into their batches"
    page.keyboard.press("j")
    page.locator(".span-story", has_text="trainer-0").get_by_text("step 0").wait_for()
    page.locator(".at-trainer li", has_text="rank 0").wait_for()
    assert stacks(live.folder) == 0
    page.get_by_role("button", name="ask for stacks").click()
    page.locator(".stacks summary", has_text="trainer-0").wait_for()
    assert stacks(live.folder) > 0


def newest_step(page: Any, reward: Any) -> int:
    """The step of the last point of a curve, as its cursor tells it."""
    deadline = time.monotonic() + 120
    for tries in itertools.count():
        box = reward.locator(".u-over").bounding_box()
        if box is not None:  # the curve may be drawn anew just now
            page.mouse.move(box["x"] + box["width"] - 1 - tries % 2, box["y"] + box["height"] / 2)
        for said in reward.locator(".at").all_inner_texts():
            return int(said.removeprefix("step "))
        assert time.monotonic() < deadline, "the curve has no point"
        page.wait_for_timeout(100)
    raise AssertionError


def test_a_curve_moves_while_the_run_trains(tab: Tab, live: Live) -> None:
    page = tab.open("/run/live")
    reward = page.locator("figure", has_text="reward").first
    reward.locator("canvas").wait_for()
    # A screenshot waits for the element to stand still, but the page replaces it with each step.
    drawn = "canvas => canvas.toDataURL()"
    first, pixels = newest_step(page, reward), reward.locator("canvas").evaluate(drawn)
    deadline = time.monotonic() + 240
    while (last := newest_step(page, reward)) < first + 2:
        assert time.monotonic() < deadline
        page.wait_for_timeout(500)
    assert reward.locator("canvas").evaluate(drawn) != pixels
    recorded = [json.loads(line)["step"] for line in (live.folder / "metrics.jsonl").read_text().splitlines()]
    assert last in recorded, "the trainer recorded what is drawn"
    steps = page.locator(".state .figure", has_text=" / 100,000")
    assert int(steps.inner_text().split()[0].replace(",", "")) > first
    holding = tab.open("/flow/live").locator(".worker .load", has_text="holds")
    holding.first.wait_for()
    assert "sample" in holding.first.inner_text()


def test_an_engine_that_is_killed_is_seen_gone_and_back_with_its_version(tab: Tab, live: Live) -> None:
    page = tab.open("/flow/live")
    engine = page.locator("[data-engine='engine-1']")
    engine.locator(".version").wait_for()
    steps = live.folder / "metrics.jsonl"
    processes = json.loads((live.folder / "processes.json").read_text())
    os.kill(next(process["pid"] for process in processes if process["name"] == "engine-1"), signal.SIGKILL)
    page.locator("[data-engine='engine-1'].problem").wait_for()
    assert engine.locator(".version").count() == 0
    page.locator("[data-engine='engine-0']:not(.problem) .version").wait_for()
    engine.get_by_text("1 restart").wait_for()
    page.locator("[data-engine='engine-1']:not(.problem) .version").wait_for()
    back = engine.locator(".version").inner_text()
    assert back.startswith("version 0.") and steps.read_text().count("\n") > 2
    page.keyboard.press("0")
    page.locator(".timeline canvas[aria-label*='engine-1 gone: ']").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_its_window(browser: Any, live: Live, size: str, scheme: str) -> None:
    tab = Tab(browser, live.address, size, scheme)
    page = tab.open("/flow/live")
    for drawn in (".loop .engine .version", ".timeline canvas[aria-label*='generate: ']", "table.rows"):
        page.locator(drawn).first.wait_for(timeout=120_000)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".timeline canvas").bounding_box()["width"] > 0.9 * SIZES[size][0]
    tab.close()


def test_the_page_ends_with_the_run(live: Live) -> None:
    live.launcher.send_signal(signal.SIGINT)
    assert live.launcher.wait(120) == 128 + signal.SIGINT
    with pytest.raises(httpx.ConnectError):
        httpx.get(live.address)
