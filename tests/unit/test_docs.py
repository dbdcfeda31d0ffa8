"""The documentation's commands parse, its config keys are keys, and the files and folders that it names exist."""

import argparse
import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.load import all_keys, load_config, preset_names
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.machine_check import TRIED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs", "artifacts", "build"}
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, sorted(FOLDERS)))})/[\w./-]*\w")
MODULE = re.compile(r"python -m ((?:rl_async|benchmarks|tests)[\w.]*)")
IMPORT = re.compile(r"from rl_async[\w.]* import ")
KEY = re.compile(r"^([a-z_]+(?:\.[a-z_0-9]+)+)(?:=.*)?$")
# The folders of the package, whose help texts and messages lead to pages.
SOURCES = sorted(file for link in (ROOT / "rl_async").iterdir() if link.is_dir() for file in link.rglob("*.py"))
NAMED = re.compile(r"docs/(?!site/|images/)([\w/.-]*[\w/])(?:#([\w-]+))?")
SUFFIXES = (".md", ".sqlite", ".py", ".yaml", ".json", ".jsonl", ".txt")


def lines(page: Path) -> Iterator[str]:
    """Indented lines of ``page`` and those between fences, which are commands and code, with continued lines joined."""
    fenced = False
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip()


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands() -> list[str]:
    return [line for page in PAGES for line in lines(page) if line.startswith("rl-async ")]


@pytest.mark.parametrize("command", commands())
def test_every_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's own parser accepts it; overrides of a preset make a valid config."""
    parse, seen = argparse.ArgumentParser.parse_known_args, []

    def parse_only(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        namespace, left = parse(self, *args, **kwargs)
        namespace.command = lambda arguments: seen.append(arguments) or 0
        return namespace, left

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    # The docs' runs are not here.
    monkeypatch.setattr("rl_async.launcher.cli.__main__._check_run", lambda run: None)
    command = re.split(r" [>|&](?: |$)", command)[0].replace(" [--address HOST:6379]", "")
    _, *words = shlex.split(command, comments=True)
    assert main(words) == 0
    (arguments,) = seen
    if getattr(arguments, "config", None) in preset_names() and hasattr(arguments, "overrides"):
        load_config(arguments.config, arguments.overrides, mode=getattr(arguments, "mode", None) or "disaggregated")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for file, heading in LINK.findall(page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), file
        if heading:
            assert heading in headings(target), f"{file}#{heading}"


@pytest.mark.parametrize("folder", sorted({file.relative_to(ROOT).parts[1] for file in SOURCES}))
def test_every_page_that_the_code_names_exists(folder: str) -> None:
    """Help texts, messages and comments name pages as docs/FOLDER/PAGE.md, and headings of them."""
    for file in (file for file in SOURCES if file.relative_to(ROOT).parts[1] == folder):
        for path, heading in NAMED.findall(file.read_text()):
            page = ROOT / "docs" / path
            assert page.is_file() and page.suffix == ".md", f"{file.relative_to(ROOT)}: docs/{path}"
            assert not heading or heading in headings(page), f"{file.relative_to(ROOT)}: docs/{path}#{heading}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """Add a new page to ``nav`` in docs/site/site.yaml."""
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "docs/site/site.yaml").read_text().partition("\nnav:")[2])
    pages = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")]
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_exists(page: Path) -> None:
    """Paths below the repository's folders, and modules given to ``python -m``."""
    text = page.read_text()
    modules = {name.replace(".", "/").removesuffix("/") for name in MODULE.findall(text)}
    modules.discard("benchmarks/NAME")
    missing = {name for name in modules if not ((ROOT / f"{name}.py").exists() or (ROOT / name).is_dir())}
    assert {path for path in PATH.findall(text) if not (ROOT / path).exists()} | missing == set()


def rows_of_promises() -> list[tuple[str, str]]:
    """The first and the last cell of each row below a heading cell "held by"."""
    found, inside = [], False
    for line in (ROOT / "docs/reference/guarantees.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [""]
        if inside and len(cells) > 1 and set(cells[0]) != {"-"}:
            found.append((cells[0], cells[-1]))
        inside = cells[-1] == "held by" or (inside and len(cells) > 1)
    return found


@pytest.mark.parametrize(("promise", "held_by"), rows_of_promises())
def test_every_promise_names_a_test_that_exists(promise: str, held_by: str) -> None:
    """A name without a path is in the file named before it."""
    file, named = "", 0
    for code in CODE.findall(held_by):
        path, _, name = code.rpartition(": ")
        file = path or (code if code.endswith(".py") else file)
        assert not file or (ROOT / "tests" / file).is_file(), file
        if name.startswith("test_") and not name.endswith(".py"):
            named += 1
            assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), code
    assert named, f"no test is named: {promise}"


def test_promises_about_strangers_are_those_of_security_md() -> None:
    """So that a sentence that changes there sends its author to the test."""
    said = " ".join((ROOT / "docs/reference/security.md").read_text().split())
    listed = (ROOT / "docs/reference/guarantees.md").read_text().partition("## Strangers")[2].partition("\n## ")[0]
    promises = [row[0] for row in rows_of_promises() if f"| {row[0]} | {row[1]} |" in listed]
    assert len(promises) > 40 and [promise for promise in promises if promise not in said] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_config_key_is_one(page: Path) -> None:
    """Names in backquotes that begin with a section of the config."""
    keys = set(all_keys())
    keys |= {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    sections = {key.split(".")[0] for key in keys}
    named = {match[1] for code in CODE.findall(page.read_text()) if (match := KEY.match(code))}
    wrong = {name for name in named if name.split(".")[0] in sections and not name.endswith(SUFFIXES)} - keys
    assert wrong == set()


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in lines(page) if IMPORT.match(line)}))
def test_every_import_works(line: str) -> None:
    exec(line, {})


def definitions(path: Path) -> set[str]:
    """The functions and classes of a file, and methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{member.name}" for member in node.body if hasattr(member, "name")}
    return found


def test_every_function_of_the_architecture_exists() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    named = re.findall(r"(?:`|^    )(\w+/[\w/]+\.py):\s+([\w.]+)", page, re.MULTILINE)
    assert len(named) > 40
    assert [(file, name) for file, name in named if name not in definitions(ROOT / file)] == []


# The version, the changelog and the page of versions agree with the places that they repeat.


def test_the_newest_heading_of_the_changelog_is_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


def test_the_page_of_versions_is_the_table_in_the_code() -> None:
    """After a change of the table, run `python docs/site/versions.py`."""
    code = "import versions; print(versions.rewrite(versions.PAGE.read_text()) == versions.PAGE.read_text())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "docs/site", capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "True\n"
    page = (ROOT / "docs/reference/versions.md").read_text()
    assert all(f"| {name} | {trial.version} |" in page for name, trials in TRIED.items() for trial in trials)
