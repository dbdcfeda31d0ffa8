"""The version, the changelog and the page of versions agree with the places that they repeat."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from rl_async.launcher.machine_check import TRIED

ROOT = Path(__file__).parents[2]


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
