"""Reads other projects' settings, and translates them: what became which of our values, and what is left to say.

Users keep settings in YAML, TOML, JSON, shell scripts and Python programs.
"""

import ast
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rl_async.configs.explain import field_at
from rl_async.configs.load import MOST_BYTES, dump_values, from_values, parse
from rl_async.configs.schema.algorithm import read_options
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
        self._leave_out_unread_options()
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

    def _leave_out_unread_options(self) -> None:
        """Leave out options of formulas that were not chosen: other projects have them all in one section."""
        names = [
            str(self.ours.get(f"algorithm.{key}", our_default(f"algorithm.{key}")))
            for key in ("advantage", "loss", "correction")
        ]
        for section, read in read_options(*names).items():
            prefix = f"algorithm.{section}."
            for key in [key for key in self.ours if key.startswith(prefix) and key.removeprefix(prefix) not in read]:
                value, written = self.ours.pop(key), self.written
                self.written = [line for line in written if not line.startswith(f"{key}: ")]
                if value != our_default(key) and len(self.written) == len(written):
                    self.notes.append(f"left out, since no chosen formula reads it: {key}={_short(value)}")

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


_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_REMOVAL = re.compile(r"~([A-Za-z_][\w.-]*)(=.*)?", re.DOTALL)
_CONFIG_NAME = re.compile(r"--config-name[= ]([\w.-]+)")
# What ends a command of a shell or redirects its output, and what stands for none or several words.
_SHELL = re.compile(r"[|&;<>]|\d*>.*|\|\||&&")
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{\w+\[[@*]\]\})")
_NEGATIVE = re.compile(r"-[\d.]")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_UNSET = re.compile(r"\$[A-Za-z_]")
_UNKNOWN = re.compile(r".*\$[({].*|\$\w+", re.DOTALL)  # computed by the shell, or nothing but a variable
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)\s*(?:,(.*))?\}")
MOST_LINE = 1 << 16  # characters of a line of a script, and of what its variables stand for


def read_text(path: Path) -> str:
    """The text of the file. Raises ConfigError, naming it."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}: more than {MOST_BYTES} bytes are no settings")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def read_settings(path: Path) -> Values:
    """Dotted keys of a YAML, JSON or TOML file, or the ``a.b=c`` arguments in a shell script."""
    text = read_text(path)
    if path.suffix == ".toml":
        try:
            return flatten(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"{path}: nested too deeply") from error
    if path.suffix in (".yaml", ".yml", ".json"):
        values = parse(text, str(path))
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected sections and keys, found {type(values).__name__}")
        return flatten(values)
    words = script_words(path)
    found = overridden({}, [word for word in words if "." in word.partition("=")[0]], str(path), others=True)
    name = _CONFIG_NAME.search(" ".join(words))
    return found | {"--config-name": name[1]} if name else found


def overridden(values: Values, words: list[str], origin: str, *, others: bool = False) -> Values:
    """Change values by Hydra's ``a.b=c``, ``+a.b=c``, ``++a.b=c`` and ``~a.b``; a removed key stays as ``~a.b``.

    Raises ConfigError for a word that is none of them, unless there may be ``others``.
    """
    found = dict(values)
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word):
            found |= flatten({match[1]: parse(match[2], f"{origin}: {match[1]}")})
        elif match := _REMOVAL.fullmatch(word):
            found = {key: value for key, value in found.items() if not f"{key}.".startswith(f"{match[1]}.")}
            found[f"~{match[1]}"] = "removed"
        elif not others:
            raise ConfigError(f"{origin}: {word!r} sets nothing; write it as a.b=c")
    return found


def script_words(path: Path) -> list[str]:
    """The words of a shell script, with the variables filled in that it sets itself or that have a default."""
    variables: dict[str, str] = {}
    expanded = 0

    def value(match: re.Match[str]) -> str:
        nonlocal expanded
        found = variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])
        expanded += len(found)
        if expanded > MOST_LINE:
            raise ConfigError(f"{path}: variables stand for more than {MOST_LINE} characters of a line")
        return found

    words = []
    for line in read_text(path).replace("\r\n", "\n").replace("\\\n", " ").split("\n"):
        if len(line) > MOST_LINE:
            raise ConfigError(f"{path}: a line has more than {MOST_LINE} characters")
        expanded = 0
        try:
            parts = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines, which is no list of arguments
            continue
        for part in parts:
            word = _VARIABLE.sub(value, part)
            assigned = _ASSIGNMENT.fullmatch(word)
            if assigned and "." not in assigned[1] and not word.startswith("+"):
                variables[assigned[1]] = assigned[2]
            words.append(word)
    return words


def flags(path: Path) -> Values:
    """The ``--flag value`` pairs in a shell script, without the dashes; a flag without a value is True."""
    found: Values = {}
    name = None
    for word in script_words(path):
        word = word.strip("()")
        if _SHELL.fullmatch(word) or _ARGUMENTS.fullmatch(word):
            name = None
        elif re.match(r"--[a-zA-Z]", word):
            name, equals, text = word[2:].partition("=")
            found[name] = parse(text, str(path)) if equals else True
            name = None if equals else name
        elif name is not None and word and (not word.startswith("-") or _NEGATIVE.match(word)):
            seen = found[name]
            if isinstance(seen, list):
                seen.append(word)
            else:
                found[name] = parse(word, str(path)) if seen is True else [seen, word]
        else:
            name = None
    return found


def calls(path: Path, names: Collection[str]) -> tuple[Values, list[str]]:
    """The keyword arguments of calls of these names in a Python program, which is read and not run.

    Values may be literals, or names of the program's own to which a literal is assigned once; others, by name, cannot
    be known. Raises ConfigError for what is not Python, and if nothing is called so.
    """
    try:
        program = ast.parse(read_text(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: not valid Python: {error}") from error
    assigned: dict[str, list[ast.expr]] = {}
    found: list[ast.Call] = []
    for node in ast.walk(program):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.Call) and _name(node.func) in names:
            found.append(node)
    if not found:
        raise ConfigError(f"{path}: no call of {' or '.join(names)}")
    values: Values = {}
    left = []
    for keyword in (keyword for call in found for keyword in call.keywords):
        expression = keyword.value
        if isinstance(expression, ast.Name) and len(assigned.get(expression.id, [])) == 1:
            expression = assigned[expression.id][0]
        try:
            value = ast.literal_eval(expression)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            left.append(f"{keyword.arg or '**'} = {ast.unparse(keyword.value)}: not a literal, and left out")
            continue
        if keyword.arg is not None:
            values[keyword.arg] = value
    return values, left


def _name(function: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def resolve_references(values: Values) -> tuple[Values, list[str]]:
    """Fill in OmegaConf's ``${a.b}`` and ``${oc.select:a.b,default}``; the rest, by name, cannot be resolved."""
    resolved, left = {}, []
    for key, value in values.items():
        for _ in range(5):
            match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                break
            value = values.get(match[1], parse(match[2].strip(), key) if match[2] is not None else _Missing)
        if value is _Missing or (isinstance(value, str) and _UNKNOWN.fullmatch(value)):
            left.append(f"{key} = {values[key]}: not resolved, and left out")
            continue
        if isinstance(value, str) and _UNSET.search(value):
            left.append(f"{key} = {value}: fill in what the environment sets there")
        resolved[key] = value
    return resolved, left


_Missing: Any = object()
