"""Reads a config of another project and writes ours, with the differences (`rl-async config from-verl` and the like).

In: a file of verl, TRL, prime-rl or slime. Out: our YAML with comments. Nothing is guessed silently: where the other
project's default differs from ours it is written out, and every value without a counterpart is named. Scripts are
worked out by `shell.py` and Python is parsed; neither is run. To add a source, write a file here with its keys as a
table, and a line below.
"""

from collections.abc import Callable
from pathlib import Path

from rl_async.configs.importing import prime_rl, slime, trl, verl
from rl_async.configs.importing.translation import NotThisKind
from rl_async.errors import ConfigError

Write = Callable[[Path, list[str]], str]


def _checked(write: Write) -> Write:
    """Return ``write`` that raises ConfigError for a value of a type that its key does not have."""

    def checked(file: Path, more: list[str]) -> str:
        try:
            return write(file, more)
        except NotThisKind as error:
            kinds = ", ".join(f"from-{kind}" for kind in SOURCES)
            raise ConfigError(f"{error}; configs that can be read: {kinds}") from error
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
            raise ConfigError(f"{file}: a value there is not of the kind that its key has: {error}") from error

    return checked


SOURCES: dict[str, Write] = {
    "verl": _checked(verl.write),
    "trl": _checked(trl.write),
    "prime-rl": _checked(prime_rl.write),
    "slime": _checked(slime.write),
}
