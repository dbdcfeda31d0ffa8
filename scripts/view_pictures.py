"""Makes the pictures of the page of docs/how-to/view.md from a small run: ``python scripts/view_pictures.py [FOLDER]``.

It trains the calculator task for about a minute on two cores, with the page beside it, and takes pictures of the page
while it trains. Needs Chromium and ``pip install 'rl-async[browser]'``.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
STEPS = 12  # that are trained before the pictures are taken
DEADLINE_S = 600
RUN = [
    *("launch", "--config", "calculator", "--mode", "disaggregated", "--name", "calculator", "tracking.view=true"),
    *("trainer.steps=1000", "rollout.engines=2", "data.train_batch_groups=6", "rollout.group_size=6", "eval.every=4"),
    *("debug.min_train_s=0.8", "launcher.stop_timeout_s=5"),
]


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, trained(Path(home)) as address, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=os.environ.get("RL_ASYNC_CHROMIUM") or shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, scheme, place, prepare in PICTURES:
            context = chromium.new_context(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
            page = context.new_page()
            page.goto(address)
            page.goto(f"{address.partition('/open/')[0]}/#/{place}")
            prepare(page)
            page.wait_for_timeout(1000)
            page.screenshot(path=out / f"view_{name}.png")
            context.close()
            print(out / f"view_{name}.png")
        chromium.close()


@contextmanager
def trained(home: Path) -> Iterator[str]:
    """Train while the block runs, from STEPS steps on; gives the address of the page."""
    log = home / "launch.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "rl_async.launcher.cli", *RUN]
        run = subprocess.Popen(command, cwd=home, stdout=output, stderr=output)
    try:
        metrics, deadline = home / "runs" / "calculator" / "metrics.jsonl", time.monotonic() + DEADLINE_S
        while not metrics.is_file() or metrics.read_text().count("\n") < STEPS:
            if run.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run did not train:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield log.read_text().partition("page: ")[2].split()[0]
    finally:
        run.send_signal(signal.SIGINT)
        run.wait()


def flow(page: Page) -> None:
    page.locator(".engine .version").first.wait_for()
    page.locator(".timeline canvas[aria-label*='generate: ']").wait_for()


def step(page: Page) -> None:
    flow(page)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.locator(".timeline").evaluate("element => element.scrollIntoView()")


def token(page: Page) -> None:
    page.locator("tbody tr").nth(8).click()
    page.locator(".token").first.wait_for()
    for _ in range(19):  # beyond the prompt
        page.keyboard.press("ArrowRight")
    page.get_by_label("the story of a token").wait_for()


PICTURES: list[tuple[str, Any, str, Callable[[Page], None]]] = [
    ("flow", "light", "flow/calculator", flow),
    ("timeline", "dark", "flow/calculator", step),
    ("token", "light", "trajectories/calculator", token),
]

if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
