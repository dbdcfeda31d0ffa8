"""The translation of one config: which of its values became which of ours, and what is left to say."""

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl_async.configs.load.fields import field_at
from rl_async.configs.load.loader import dump_values, from_values
from rl_async.errors import ConfigError

Values = dict[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class Key:
    """A key of another project that is one key here."""

    theirs: str
    ours: str
    default: Any = None  # the other project's; None: its absence says nothing
    convert: Callable[[Any], Any] = lambda value: value
    skip: tuple[Any, ...] = (None,)  # values that mean "not set"


@dataclass
class Translation:
    """Values of another project's config on their way into ours."""

    given: Values
    ours: Values = field(default_factory=dict)
    written: list[str] = field(default_factory=list)  # because the other project's default is another one
    notes: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of the other project's ``key``, which is accounted for from now on."""
        self._used.add(key)
        return self.given.get(key, default)

    def number(self, key: str, default: int) -> int:
        """Take a number. Raises ConfigError, naming the key, if it is something else."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key}: {value!r} is not a number")
        return int(value)

    def put(self, key: str, value: Any, *theirs: str) -> None:
        """Set our ``key``. A value that none of ``theirs`` gives is the other project's default."""
        if any(name in self.given for name in theirs):
            self.ours[key] = value
        elif value != (here := our_default(key)):
            self.ours[key] = value
            self.written.append(f"{key}: {_short(value)} ({_short(here)} here), for {' and '.join(theirs)}")

    def translate(self, keys: Iterable[Key]) -> None:
        """Put each key of a table whose value is given or has a default."""
        for key in keys:
            value = self.take(key.theirs, key.default)
            if value in key.skip:
                continue
            try:
                converted = key.convert(value)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise ConfigError(f"{key.theirs}: {_short(value)} is not a value of {key.ours}") from error
            self.put(key.ours, converted, key.theirs)

    def text(self, head: str, no_counterpart: Mapping[str, str]) -> str:
        """Our YAML, below comments about everything that needs a look.

        Raises ConfigError if nothing that is given is known: then it is not such a config.
        """
        named, unknown = self._left(no_counterpart)
        if len(unknown) == len(self.given):
            first = f": {', '.join(line.partition(' = ')[0] for line in unknown[:5])}" if unknown else ""
            raise ConfigError(f"{head.rstrip('.')}: it holds none of the settings that this command knows{first}")
        values = nested(self.ours)
        try:
            from_values(values)
        except ConfigError as error:
            self.notes.append(f"refused as it stands: {error}")
        comments = [
            head,
            *_section("Defaults there that are others here, and are written below:", self.written),
            *_section("What to look at:", self.notes),
            *_section("Given there, without a counterpart here:", named),
            *_section("Given there, and not known to this command:", unknown),
        ]
        return "".join(f"# {_printable(line)}".rstrip() + "\n" for line in comments) + dump_values(values)

    def _left(self, no_counterpart: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Say what was given and not used: keys below a prefix of ``no_counterpart`` together, and all others."""
        named: dict[str, list[str]] = {}
        unknown = []
        for key, value in self.given.items():
            if key in self._used:
                continue
            prefix = next((p for p in no_counterpart if key == p or key.startswith(f"{p}.")), None)
            if prefix is None:
                unknown.append(f"{key} = {_short(value)}")
            else:
                named.setdefault(prefix, []).append(key)
        lines = []
        for prefix, keys in named.items():
            values = [f"{key} = {_short(self.given[key])}" for key in keys]
            lines.append(f"{no_counterpart[prefix]}: {', '.join(values)}")
        return lines, unknown


def our_default(key: str) -> Any:
    """The default of our ``key`` as plain values; None for a required one."""
    found = field_at(key)
    assert found is not None, key
    if found.required:
        return None
    value = found.default if found.default is not msgspec.NODEFAULT else found.default_factory()
    return list(value) if isinstance(value, tuple) else msgspec.to_builtins(value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Values:
    """Dotted keys of nested sections; lists stay values, and empty sections vanish."""
    flat: Values = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nested(flat: Values) -> dict[str, Any]:
    """Sections from dotted keys."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    return result


def _printable(text: str) -> str:
    """Return the text with everything spelled out that could end a comment: YAML knows more line breaks than one."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _section(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    wrapped = [part for line in lines for part in textwrap.wrap(line, 114, subsequent_indent="    ")]
    return ["", title, *(f"  {line}" for line in wrapped)]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str) if value is None or isinstance(value, bool | list) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
