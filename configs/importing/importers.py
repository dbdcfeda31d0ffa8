"""The projects whose configs can be read: file and further settings -> our YAML."""

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
