"""The documentation site in Chromium: what a search finds first, and tables that fit."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import SIZES
from tests.e2e.docs.test_site import site

__all__ = ["site"]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("zensical") is None, reason="install it with pip install 'rl-async[docs]'"),
]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    # Consumes requests; produces the site's files. Waits for connections; unblocked by ``shutdown``.
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("custom loss", "/reference/algorithms/"),
        ("custom advantage", "/reference/algorithms/"),
        ("quickstart", "/tutorials/first_run/"),
        ("install", "/"),
        ("OOM", "/faq/"),
        ("resume", "/tutorials/first_run/"),
        ("multi-node", "/how-to/clusters/"),
    ],
)
def test_a_search_finds_the_right_page_first(browser: Any, address: str, query: str, first: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    page.locator(".md-search__button").first.click()
    page.locator("input[role=combobox], input[type=search], input[placeholder]").last.fill(query)
    # Results mark the words that were found in their addresses.
    found = page.locator("a[href*='?h=']").first
    found.wait_for()
    assert found.get_attribute("href").removeprefix(address).partition("?")[0] == first
    page.close()


# Whether the page scrolls sideways, and the tables that reach beyond what the reader sees or can scroll to.
CUT = """scrolls => {
    const cut = (table) => {
        const right = table.getBoundingClientRect().right - 1;
        for (let outer = table.parentElement; outer !== document.body; outer = outer.parentElement) {
            const overflow = getComputedStyle(outer).overflowX;
            if (overflow !== "visible" && right > outer.getBoundingClientRect().right)
                return !(scrolls && ["auto", "scroll"].includes(overflow));
        }
        return false;
    };
    const tables = [...document.querySelectorAll("table")].filter(cut).map((table) => table.innerText.slice(0, 60));
    return [document.documentElement.scrollWidth > innerWidth, ...tables];
}"""


@pytest.mark.parametrize("size", SIZES)
def test_no_table_is_cut(browser: Any, address: str, site: Path, size: str) -> None:
    """Beside the text every table fits; on a phone wide ones scroll, and the page does not."""
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height})
    cut = {}
    for file in sorted(site.rglob("index.html")):
        name = file.parent.relative_to(site).as_posix()
        page.goto(f"{address}/{name}/".replace("/./", "/"), wait_until="load")
        if (found := page.evaluate(CUT, size == "narrow")) != [False]:
            cut[name] = found
    page.close()
    assert cut == {}
