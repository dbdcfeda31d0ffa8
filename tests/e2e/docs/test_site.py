"""The documentation site builds strictly, has what it is generated from, and fetches nothing from elsewhere."""

import functools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.load import all_keys, struct_at
from rl_async.launcher.cli.__main__ import COMMANDS
from tests.e2e.browser import SIZES

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("zensical") is None, reason="install it with pip install 'rl-async[docs]'"),
]


ROOT = Path(__file__).parents[3]
SOURCES = {"script": "src", "img": "src", "source": "src", "iframe": "src"}  # and `link`, by what it is for
FETCHED = {"stylesheet", "icon", "preload", "modulepreload", "preconnect"}


class Page(HTMLParser):
    """What a browser fetches to show a page, and the page's anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or "")
        if tag == "link" and FETCHED & set((given.get("rel") or "").split()):
            self.fetched.append(given.get("href") or "")
        elif tag in SOURCES:
            self.fetched.append(given.get(SOURCES[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    built = subprocess.run(
        [sys.executable, ROOT / "docs/site/build.py", "--out", out], capture_output=True, text=True, timeout=170
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    found = {str(path.relative_to(site)): Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(found) > 40
    return found


def test_every_page_of_docs_is_on_the_site_and_in_its_navigation(site: Path) -> None:
    start = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix().removesuffix("index").rstrip("/")
        assert (site / name / "index.html").exists(), name
        assert f'href="./{name}/"' in start or not name, name  # the pages' own links have no dot


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        for url in page.fetched:
            assert not re.match(r"(https?:)?//", url), (name, url)
            if url and not url.startswith("data:") and name != "404.html":
                assert ((site / name).parent / url.partition("?")[0]).exists(), (name, url)
        assert "mermaid" not in (site / name).read_text(), name  # which the theme would fetch


def test_every_config_key_has_an_anchor(pages: dict[str, Page]) -> None:
    anchors = set().union(*(page.anchors for name, page in pages.items() if "/configuration/" in name))
    missing = {key for key in all_keys() if key.replace(".", "").lower() not in anchors}
    assert {key for key in missing if struct_at(key) is None or "." in key} == set()


def test_every_command_has_an_anchor(pages: dict[str, Page]) -> None:
    assert {f"rl-async-{name}" for name in COMMANDS} <= pages["reference/command_line/index.html"].anchors


def test_formulas_are_drawn_by_the_browser(site: Path) -> None:
    text = (site / "reference/algorithms/index.html").read_text()
    assert text.count("<math") > 80
    assert all("arithmatex" not in page.read_text() for page in site.rglob("*.html"))


def test_what_only_tests_read_is_not_shown(site: Path) -> None:
    for page in (site / "tutorials").rglob("*.html"):
        text = page.read_text()
        assert "check: python" not in text and "skip: next" not in text and "{{ keys of" not in text, page


# The documentation site in Chromium: what a search finds first, and tables that fit.


__all__ = ["site"]


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


@pytest.mark.slow
@pytest.mark.timeout(300)
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


@pytest.mark.slow
@pytest.mark.timeout(300)
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
