"""What the benchmarks' command lines have in common."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path


def parser(description: str | None, *workers: str) -> argparse.ArgumentParser:
    """``--repeats`` and ``--json``, and hidden flags by which a benchmark starts itself as one of its processes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--json", type=Path)
    for flag in workers:
        made.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return made


def save(results: Mapping[str, float | None], file: Path | None) -> None:
    """Write the goals' keys, if a file was asked for."""
    if file is not None:
        file.write_text(json.dumps(results, indent=2) + "\n")
