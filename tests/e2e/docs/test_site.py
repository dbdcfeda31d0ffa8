"""The documentation site builds strictly, has what it is generated from, and fetches nothing from elsewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl_async.configs.explain import all_keys, struct_at
from rl_async.launcher.cli.__main__ import COMMANDS

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("zensical") is None, reason="install it with pip install 'rl-async[docs]'"),
]
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
