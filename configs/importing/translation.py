"""Reads other projects' settings, and translates them into our values, with notes on the rest.

Users keep settings in YAML, TOML, JSON, shell scripts and Python programs.
"""

import ast
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from rl_async.configs.importing.shell import is_unknown, read_script
from rl_async.configs.load import dump_values, field_at, parse, read_text, refusals
from rl_async.configs.schema.algorithm import read_options
from rl_async.configs.schema.rollout import MOST_KEPT
from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE

# Values by their dotted keys.
Values = dict[str, Any]
# Stands for a file of the user's own in a value that the other project's file does not say.
FILL_IN = "FILL_IN"
# Held-out tasks of a project that evaluates on all of them: more than any file has.
EVERY_TASK = 1_000_000


@dataclass(frozen=True)
class Key:
    """A key of another project that is one key here.

    ``default`` is the other project's; without one, a config that lacks the key says nothing about it. A value in
    ``skip`` means that the key is not set.
    """

    theirs: str
    ours: str
    default: Any = None
    convert: Callable[[Any], Any] = lambda value: value
    skip: tuple[Any, ...] = (None,)


class NotThisKind(ConfigError):
    """A file is not a config of the project that it was read as."""


@dataclass
class Translation:
    """Values of another project's config on their way into ours.

    ``written`` names the values that are written out because the other project has another default, ``unknown`` those
    that its file does not say. ``missing`` names abilities that are not here, and whose lack makes another run of it.
    """

    given: Values
    ours: Values = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of the other project's ``key``, which is accounted for from now on."""
        self._used.add(key)
        return self.given.get(key, default)

    def number(self, key: str, default: int, least: int | None = None) -> int:
        """Take a whole number. Raises ConfigError, naming the key, if it is something else or less than ``least``."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
            raise ConfigError(f"{key}: {value!r} is not a whole number")
        if least is not None and value < least:
            raise ConfigError(f"{key}: {value!r} is less than {least}")
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

    def only(self, key: str, *allowed: Any) -> None:
        """Take a setting that has one value here, which the other project may write in several ways."""
        if (value := self.take(key)) not in (None, *allowed):
            self.missing.append(f"{key}={_short(value)}; here it is always {allowed[0]}")

    def truncation(self, top_k: str, top_p: str) -> None:
        """Put `rollout.truncation` for the other project's number of tokens (off: -1 or 0) and probability (off: 1)."""
        unread = [
            key
            for key in (top_k, top_p)
            if any(note.startswith(f"{key} = ") and UNRESOLVED in note for note in self.notes)
        ]
        number = 0 if self.take(top_k) is None else self.number(top_k, 0)
        share = 1.0 if self.take(top_p) is None else self.take(top_p)
        if unread:
            self.missing.append(f"rollout.truncation: {' and '.join(unread)} could not be read; give values")
            return
        if number not in (-1, 0) and not 2 <= number <= MOST_KEPT:
            self.missing.append(f"{top_k}={number}; in rollout.truncation.top_k it is 2 to {MOST_KEPT}")
        elif number > 0 or share != 1:
            self.ours |= {"rollout.truncation.top_k": max(number, 0) or MOST_KEPT, "rollout.truncation.top_p": share}
            self.notes.append("rollout.truncation: evaluations are truncated in the same way")
            if number <= 0:
                self.notes.append(
                    f"rollout.truncation.top_k: engines name few tokens, so no more than {MOST_KEPT} are sampled, also "
                    f"where {top_p}={share} has more"
                )

    def text(self, head: str, no_counterpart: Mapping[str, str]) -> str:
        """Our YAML, below comments about everything that needs a look.

        Raises NotThisKind if nothing that is given is known, or almost nothing of many keys: projects share a few
        common names. Raises ConfigError if the run would need an ability that is missing.
        """
        named, unknown = self._left(no_counterpart)
        # A value that the file does not hold is missing only where its key is read.
        for line in [line for line in self.notes if line.endswith(UNRESOLVED)]:
            if line.partition(" = ")[0] in self._used:
                self.notes.remove(line)
                self.unknown.append(line)
        many = len(self.given) >= MANY and len(unknown) > UNKNOWN_SHARE * len(self.given)
        used = any(key in self._used for key in self.given)
        if many or not (used or (named and not unknown)):
            first = f": {', '.join(line.partition(' = ')[0] for line in unknown[:5])}" if unknown else ""
            least = "almost none" if many else "none"
            raise NotThisKind(f"{head.rstrip('.')}: it holds {least} of the settings that this command knows{first}")
        self._leave_out_unread_options()
        if self.ours.get("trainer.checkpoint_every") and "trainer.keep_checkpoints" not in self.ours:
            kept = our_default("trainer.keep_checkpoints")
            self.notes.append(f"trainer.keep_checkpoints: all checkpoints are kept there; here, the last {kept}")
        if self.missing:
            raise ConfigError(f"{head.rstrip('.')}: this run cannot be had here: {'; '.join(self.missing)}")
        values = nested(self.ours)
        marked = [(key, str(value)) for key, value in self.ours.items()]
        places = [f"{key} = {text}" for key, text in marked if is_unknown(text) or FILL_IN in text]
        empty = [f"{key} is not given" for key in ("model.path", "data.path") if key not in self.ours]
        comments = [
            head,
            *_section("To fill in:", [*empty, *places, *self.unknown]),
            *_section("Refused as it stands; what to change:", refusals(values)),
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
            if key not in no_counterpart and (meant := self._nearest(key)):
                unknown.append(f"{key} = {_short(value)}; is {meant} meant?")
            elif prefix is None:
                unknown.append(f"{key} = {_short(value)}")
            else:
                named.setdefault(prefix, []).append(key)
        lines = []
        for prefix, keys in named.items():
            values = [f"{key} = {_short(self.given[key])}" for key in keys]
            lines.append(f"{no_counterpart[prefix]}: {', '.join(values)}")
        return lines, unknown

    def _nearest(self, key: str) -> str | None:
        """Return the key of the same section that ``key`` misspells: one that was looked for and is not given."""
        section, _, name = key.rpartition(".")
        absent = (other.rpartition(".") for other in self._used if other not in self.given)
        near = get_close_matches(name, [last for head, _, last in absent if head == section], 1, 0.85)
        return f"{section}.{near[0]}".lstrip(".") if near else None


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
# A dotted key, or the group of verl's that chooses the trainer.
_SETTING = re.compile(r"[+~]{0,2}(?:[A-Za-z_]\w*\.[\w.-]*|model_engine)(=|$)")
_CONFIG_NAME = re.compile(r"--config-name[= ]([\w.-]+)")
_NEGATIVE = re.compile(r"-[\d.]")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)\s*(?:,(.*))?\}")
# Computed by the shell, or nothing but a variable: no part of it is a value.
_NO_VALUE = re.compile(r".*\$\(.*|`.*|\$\{[^}]*\}|\$\w+", re.DOTALL)
# A file of so many keys of which a greater share is unknown was written for another program.
MANY, UNKNOWN_SHARE = 8, 0.7


def read_settings(path: Path) -> tuple[Values, list[str]]:
    """Dotted keys of a YAML, JSON or TOML file, or a shell script's ``a.b=c`` arguments, and the assumptions made."""
    if path.suffix in STRUCTURED:
        return read_structured(path), []
    command, assumed = read_command(path, lambda command: sum(map(bool, map(_SETTING.match, command))))
    found = overridden({}, [word for word in command if _SETTING.match(word)], str(path), others=True)
    name = _CONFIG_NAME.search(" ".join(command))
    return (found | {"--config-name": name[1]} if name else found), assumed


# TOML's reader takes the square of the parts of a dotted key in time.
_DEEP_KEY = re.compile(r"""(?:\.[\w"' -]++){32}""")
STRUCTURED = (".yaml", ".yml", ".json", ".toml")


def read_structured(path: Path) -> Values:
    """Dotted keys of a YAML, JSON or TOML file."""
    return flatten(read_sections(path))


def read_sections(path: Path) -> dict[str, Any]:
    """The sections of a YAML, JSON or TOML file, empty ones included."""
    text = read_text(path)
    if path.suffix == ".toml":
        if _DEEP_KEY.search(text):
            raise ConfigError(f"{path}: nested too deeply")
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"{path}: nested too deeply") from error
        # Python refuses to read numbers of thousands of digits.
        except ValueError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
    values = parse(text, str(path))
    if not isinstance(values, dict):
        raise NotThisKind(f"{path}: expected sections and keys, found {type(values).__name__}")
    return values


def overridden(values: Values, words: list[str], origin: str, *, others: bool = False) -> Values:
    """Change values by Hydra's ``a.b=c``, ``+a.b=c``, ``++a.b=c`` and ``~a.b``; a removed key stays as ``~a.b``.

    Raises ConfigError for a word that is none of them, unless there may be ``others``.
    """
    found = dict(values)
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word):
            try:
                value = parse(match[2], f"{origin}: {match[1]}")
            except ConfigError:
                # Hydra's own grammar allows values that YAML does not, such as patterns of module names.
                if not others:
                    raise
                value = match[2]
            found |= flatten({match[1]: value})
        elif match := _REMOVAL.fullmatch(word):
            found = {key: value for key, value in found.items() if not f"{key}.".startswith(f"{match[1]}.")}
            found[f"~{match[1]}"] = "removed"
        elif not others:
            raise ConfigError(f"{origin}: {word!r} sets nothing; write it as a.b=c")
    return found


def read_command(
    path: Path, settings: Callable[[list[str]], int], text: str | None = None
) -> tuple[list[str], list[str]]:
    """The command of a script with most ``settings``, and the values that its script was assumed to choose.

    A script that fills arrays and runs nothing with them is read as if it ran a command with all of them.
    """
    script = read_script(read_text(path) if text is None else text, str(path))
    command = max(script.commands, key=settings, default=[])
    if not settings(command):
        command = [word for words in script.arrays.values() for word in words]
    return command, script.assumed


def flags(command: list[str], origin: str) -> Values:
    """The ``--flag value`` pairs of a command, without the dashes; a flag without a value is True."""
    found: Values = {}
    name = None
    for word in command:
        if re.match(r"--[a-zA-Z]", word):
            name, equals, text = word[2:].partition("=")
            found[name] = _value(text, origin) if equals else True
            name = None if equals else name
        elif name is not None and word and (not word.startswith("-") or _NEGATIVE.match(word)):
            seen = found[name]
            # A variable that the script leaves unset, behind a value: further flags, perhaps.
            if seen is not True and _NO_VALUE.fullmatch(word):
                continue
            if isinstance(seen, list):
                seen.append(word)
            else:
                found[name] = _value(word, origin) if seen is True else [seen, word]
        else:
            name = None
    return found


def _value(text: str, origin: str) -> Any:
    try:
        return parse(text, origin)
    except ConfigError:
        return text


def script_flags(path: Path, program: re.Pattern[str], text: str | None = None) -> tuple[Values, list[str], str]:
    """The flags behind the word of a script that names the ``program``, what was assumed, and that word.

    ``text``: the script's, if it is part of the file alone.
    """

    def after(command: list[str]) -> int:
        return next((place + 1 for place, word in enumerate(command) if program.fullmatch(word)), 0)

    def count(command: list[str]) -> int:
        return sum(word.startswith("--") for word in command[after(command) :]) if after(command) else 0

    command, assumed = read_command(path, count, text)
    place = after(command)
    return flags(command[place:], str(path)), assumed, command[place - 1] if place else ""


@dataclass
class Program:
    """A Python program that is read and not run.

    ``assigned`` has the expressions that it assigns to its names, ``flags`` the defaults of its own command line.
    """

    path: Path
    tree: ast.Module
    assigned: dict[str, list[ast.expr]]
    flags: Values
    calls: list[ast.Call]

    def named(self, names: Collection[str]) -> list[ast.Call]:
        """The calls of these names, in the order of the program."""
        return [call for call in self.calls if _name(call.func) in names]

    def definition(self, expression: ast.expr) -> ast.expr:
        """What a name stands for that is assigned once; else the expression itself."""
        for _ in range(5):
            if not isinstance(expression, ast.Name) or len(self.assigned.get(expression.id, [])) != 1:
                break
            expression = self.assigned[expression.id][0]
        return expression

    def value(self, expression: ast.expr) -> Any:
        """The value of a literal, a name of one, or a flag with a default. Raises ValueError for others."""
        expression = self.definition(expression)
        if isinstance(expression, ast.Attribute) and expression.attr in self.flags:
            return self.flags[expression.attr]
        try:
            return ast.literal_eval(expression)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError("not a literal") from error

    def text(self) -> str:
        """The text at the top of the program, where TRL's examples have the commands that start them."""
        return ast.get_docstring(self.tree) or next(
            (
                node.value.value
                for node in self.tree.body[:3]
                if isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ),
            "",
        )


def read_program(path: Path) -> Program:
    """Parse a Python program. Raises ConfigError for text that is not Python."""
    try:
        tree = ast.parse(read_text(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: not valid Python: {error}") from error
    program = Program(path, tree, {}, {}, [])
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                program.assigned.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                program.assigned.setdefault(name, []).append(value)
            case ast.Call():
                program.calls.append(node)
    for call in program.named(("add_argument",)):
        default = next((keyword.value for keyword in call.keywords if keyword.arg == "default"), None)
        names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        flag = next((name for name in names if name.startswith("--")), None)
        if flag is not None and default is not None:
            try:
                program.flags[flag[2:].replace("-", "_")] = ast.literal_eval(default)
            except (ValueError, TypeError, SyntaxError):
                # A default that the program computes.
                continue
    return program


def keywords(program: Program, names: Collection[str]) -> tuple[Values, list[str]]:
    """The keyword arguments of the calls of these names, and those whose values cannot be known."""
    values: Values = {}
    left = []
    for keyword in (keyword for call in program.named(names) for keyword in _unpacked(program, call)):
        try:
            value = program.value(keyword.value)
        except ValueError:
            left.append(f"{keyword.arg or '**'} = {ast.unparse(keyword.value)}: not a literal, and left out")
            continue
        if keyword.arg is not None:
            values[keyword.arg] = value
    return values, left


def _unpacked(program: Program, call: ast.Call) -> list[ast.keyword]:
    """The keywords of a call; ``**name`` of a dictionary that the program writes out is those of the dictionary."""
    found = []
    for keyword in call.keywords:
        expression = program.definition(keyword.value) if keyword.arg is None else None
        if isinstance(expression, ast.Call) and _name(expression.func) == "dict" and not expression.args:
            found += expression.keywords
        elif isinstance(expression, ast.Dict) and all(isinstance(key, ast.Constant) for key in expression.keys):
            pairs = zip(expression.keys, expression.values, strict=True)
            found += [ast.keyword(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]
        else:
            found.append(keyword)
    return found


def _name(function: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def count_rows(file: Any) -> int | None:
    """Count the rows of a Parquet or JSONL file; None for a file that is not here."""
    path = Path(str(file))
    if path.suffix not in (".parquet", ".jsonl") or not path.is_file():
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def data_sources(file: Any) -> list[str]:
    """Return the values of the column `data_source` of a Parquet or JSONL file; none where either is missing.

    Raises ConfigError for a line that is not JSON.
    """
    path = Path(str(file))
    if path.suffix not in (".parquet", ".jsonl") or not path.is_file():
        return []
    if path.suffix == ".parquet":
        import pyarrow.parquet

        parquet = pyarrow.parquet.ParquetFile(path)
        if "data_source" not in parquet.schema_arrow.names:
            return []
        found = parquet.read(columns=["data_source"]).column(0).unique().to_pylist()
    else:
        with path.open("rb") as lines:
            try:
                rows = [json.loads(line) for line in lines if line.strip()]
            except UNDECODABLE as error:
                raise ConfigError(f"{path}: a line is not JSON: {error}") from error
        found = [row.get("data_source") for row in rows if isinstance(row, dict)]
    return sorted({str(one) for one in found if one is not None})


def resolve_references(values: Values) -> tuple[Values, list[str]]:
    """Fill in OmegaConf's ``${a.b}`` and ``${oc.select:a.b,default}``; the rest, by name, cannot be resolved."""
    resolved, left = {}, []
    for key, value in values.items():
        for _ in range(5):
            match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                break
            value = values.get(match[1], parse(match[2].strip(), key) if match[2] is not None else _Missing)
        if value is _Missing or (isinstance(value, str) and _NO_VALUE.fullmatch(value)):
            left.append(f"{key} = {values[key]}{UNRESOLVED}")
            continue
        resolved[key] = value
    return resolved, left


_Missing: Any = object()
UNRESOLVED = ": not resolved, and left out"
