"""Runs a tutorial as its reader would: in an empty folder, block by block, as written.

| block | what happens |
|---|---|
| bash | runs; it must exit with 0 |
| python | runs as a program of its own |
| any language with ``title="FILE"`` | is written to FILE |
| ``<!--- check: python`` to ``-->`` | runs as Python and asserts what the text around it claims; not on the site |
| ``<!--- skip: next REASON -->`` | the next block is left out |

Other blocks, without a title, show output and are not run.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sybil import Document, Example, Region
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer
from sybil.typing import Evaluator

BLOCK = RawFencedCodeBlockLexer(re.compile(r'(?P<language>\w+)(?: title="(?P<title>[^"]+)")?[ \t]*$\n', re.MULTILINE))
CHECK = DirectiveInHTMLCommentLexer("check", "python")
SKIP = re.compile(r"^<!--- skip: next .+ -->\n+", re.MULTILINE)
COMMANDS = {"bash": ["bash", "-euo", "pipefail"], "python": [sys.executable]}


class BlockFailed(AssertionError):
    """A block ended with another exit code than 0; the message has its place and its output."""


def blocks(page: Path, folder: Path, environment: Mapping[str, str]) -> list[Example]:
    """Return what a page has its reader do, in order; evaluating one does it in ``folder``."""

    def write(example: Example) -> None:
        path = folder / example.region.lexemes["title"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example.parsed)

    def run(example: Example) -> None:
        language = example.region.lexemes.get("language") or "python"
        script = folder / f".block-{example.line}"
        script.write_text(example.parsed)
        place = f"{page}:{example.line}"
        code, output = _run([*COMMANDS[language], script.name], folder, environment)
        script.unlink()
        if code:
            raise BlockFailed(f"{place}: exit code {code}\n{output[-6000:]}")

    def parse(document: Document) -> list[Region]:
        checks = list(CHECK(document))
        skipped = {match.end() for match in SKIP.finditer(document.text)}
        assert document.text.count("<!---") == len(checks) + len(skipped), f"{page}: a comment that is no check or skip"
        regions = []
        for region in [*BLOCK(document), *checks]:
            evaluator: Evaluator | None = None
            if region.start in skipped:
                continue
            if region.lexemes.get("title"):
                evaluator = write
            elif region.lexemes.get("language", "python") in COMMANDS:
                evaluator = run
            if evaluator is not None:
                region.parsed, region.evaluator = region.lexemes["source"], evaluator
                regions.append(region)
        return regions

    return list(Document.parse(str(page), parse))


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command to its end; return exit code and output. What it leaves behind is ended with it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    finally:
        with suppress(ProcessLookupError):  # a run that a failed block left behind stops its own processes
            os.killpg(process.pid, signal.SIGTERM)
    return process.returncode, output
