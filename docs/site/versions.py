"""The table of versions that were run, from the declarations by which `rl-async doctor` warns of others.

python docs/site/versions.py        # replaces the table in docs/reference/versions.md; a test compares
"""

from pathlib import Path

from markup import table

from rl_async.launcher.machine_check import TRIED

PAGE = Path(__file__).parents[1] / "reference/versions.md"
HEADING = "## What was run\n"


def rewrite(text: str) -> str:
    """Return the page with the table below its heading replaced."""
    before, heading, after = text.partition(HEADING)
    introduction = after.partition("\n|")[0].rstrip("\n")
    rows = [(name, one.version, one.ran, one.when) for name, trials in TRIED.items() for one in trials]
    return f"{before}{heading}{introduction}\n\n{table(['package', 'version', 'with', 'on'], rows)}"


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text()))
