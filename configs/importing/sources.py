"""The projects whose configs can be read: file and further settings -> our YAML."""

from collections.abc import Callable
from pathlib import Path

from rl_async.configs.importing import prime_rl, slime, trl, verl

SOURCES: dict[str, Callable[[Path, list[str]], str]] = {
    "verl": verl.write,
    "trl": trl.write,
    "prime-rl": prime_rl.write,
    "slime": slime.write,
}
