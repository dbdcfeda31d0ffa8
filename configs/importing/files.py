"""Reads what other projects' users keep their settings in: YAML, TOML, JSON, shell scripts and Python programs."""

import ast
import re
import shlex
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl_async.configs.importing.translation import Values, flatten
from rl_async.configs.load.loader import MOST_BYTES, parse
from rl_async.errors import ConfigError

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
