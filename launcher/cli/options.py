"""Options that several commands share: a config, overrides of its keys, a run folder."""

import argparse
from pathlib import Path


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and the overrides of its keys."""
    parser.add_argument("--config", required=True, metavar="NAME|PATH", help="a preset or a YAML file")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, text: str = "values for config keys") -> None:
    """Add ``a.b=c`` words, which ``__main__`` also accepts between options."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help=text)


def add_run(parser: argparse.ArgumentParser, text: str = "run folder") -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=text)
