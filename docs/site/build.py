"""Builds the documentation site into build/site: the pages of docs/ and those generated from the code.

    python docs/site/build.py [--out FOLDER]

Pages are copied to a temporary folder, the generated ones are written beside them, and Zensical builds the whole
strictly: a link to a page or heading that does not exist ends the build. Formulas then become MathML, which browsers
draw themselves, so that viewing a page fetches nothing from elsewhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line
import configuration
import formulas
import migration
import notebooks
import python_api
import yaml

ROOT = Path(__file__).parents[2]
CHECKS = re.compile(r"^<!--- .*?-->\n\n?", re.MULTILINE | re.DOTALL)  # what the tests of tutorials run unseen
GENERATED: dict[str, Callable[[Path], list[str]]] = {
    "configuration": configuration.write,
    "command line": command_line.write,
    "Python": python_api.write,
}


def main() -> int:
    """Build; the exit code is Zensical's."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build/site", metavar="FOLDER", help="replaced if it exists")
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        _write_pages(work / "pages")
        _write_config(work)
        built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=work)
        if built.returncode == 0:
            for page in (work / "site").rglob("*.html"):
                page.write_text(formulas.to_mathml(page.read_text(), page.relative_to(work)))
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(work / "site", out)
            print(f"open {out / 'index.html'}, or: python -m http.server --directory {out}")
    return built.returncode


def _write_pages(pages: Path) -> None:
    """Copy the pages, without what only the tests read, with tables that come from the code filled in."""
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("site"))
    shutil.copy(ROOT / "docs/site/site.css", pages)
    for page in pages.rglob("*.md"):
        text = CHECKS.sub("", page.read_text()).replace(".ipynb)", ".md)")
        page.write_text(migration.fill(text))
    for notebook in pages.rglob("*.ipynb"):
        notebooks.convert(notebook, notebook.parent)


def _write_config(work: Path) -> None:
    """Write Zensical's config, and the pages that it names as generated."""
    config = yaml.load((ROOT / "docs/site/site.yaml").read_text(), yaml.UnsafeLoader)
    made = {name: write(work / "pages") for name, write in GENERATED.items()}
    config["nav"] = _with_generated(config["nav"], made)
    for plugin in config["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    (work / "mkdocs.yml").write_text(yaml.dump(config, sort_keys=False))


def _with_generated(nav: list[Any], made: dict[str, list[str]]) -> list[Any]:
    """Replace ``GENERATED name`` by the pages of that name: by a list where it has a title, in place where not."""
    result: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            if isinstance(value, list):
                value = _with_generated(value, made)
            elif value.startswith("GENERATED "):
                value = made[value.removeprefix("GENERATED ")]
            result.append({title: value})
        elif entry.startswith("GENERATED "):
            result += made[entry.removeprefix("GENERATED ")]
        else:
            result.append(entry)
    return result


if __name__ == "__main__":
    sys.exit(main())
