"""Loads a RunConfig from a preset or a file and ``a.b=c`` overrides, and checks it. Errors name file, line or argument.

Keys are looked up by dotted name, for error messages and `rl-async config explain`: type, default, meaning.
``algorithm.correction`` is explained in words, preset by preset.

PyYAML reads YAML 1.1, so `1e-3` and bands such as `0.5_5` need the resolvers below. ruamel.yaml would not remove them
(its YAML 1.2 still reads 0.5_5 as 0.55), nor the walk that collects line numbers, and would make `yes` and `on` text.
"""

import copy
import difflib
import functools
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import inspect
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError
from yaml.representer import RepresenterError

from rl_async.configs.checks import check, problems
from rl_async.configs.schema.algorithm import (
    MAX_REFILLS,
    PRESETS,
    AlgorithmConfig,
    Correction,
    band,
    limits,
    read_options,
)
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.suggestions import DROPPED, GROUPED, key_hint, nearest, replacement
from rl_async.configs.suggestions import hint as foreign_hint
from rl_async.errors import ConfigError

log = logging.getLogger("rl_async.configs")

# By a part of PyYAML's message. The first part that the message contains counts.
_REMEDIES = {
    r"character '\t'": "indent with spaces, not with tabs",
    "found character": "put text that begins with this character in quotes",
    "mapping values are not allowed": "put text with a colon in quotes; else fix this line's indentation, or the line "
    "before, where the space behind a colon may be missing",
    "could not find expected ':'": "write KEY: VALUE or - ITEM, with the space",
    "expected <block end>": "indent all keys of a section alike",
    "expected the node content": "give a value, or close the bracket",
    "expected ',' or": "close the bracket, or put a comma between its items",
    "end of stream": "close the quotes",
    "unknown escape character": "use single quotes, in which a backslash stands for itself",
    "found unhashable key": "put text with braces in quotes",
    "found undefined alias": "put text that begins with * in quotes",
    "expected alphabetic or numeric": "put text that begins with * or & in quotes",
    "found duplicate anchor": "give one of them another name",
    "could not determine a constructor for the tag": "put text that begins with ! in quotes",
    "found another document": "remove the line ---",
    "is no value": "put it in quotes if it is text",
    "unacceptable character": "remove it, or write it as an escape in double quotes",
}


def explain_mistake(error: yaml.MarkedYAMLError | ReaderError, text: str, origin: str) -> str:
    """Describe the mistake in ``text``, which is from ``origin``, as ORIGIN:LINE:COLUMN, both counted from 1."""
    if isinstance(error, ReaderError):
        line, column = text.count("\n", 0, error.position), error.position - text.rfind("\n", 0, error.position) - 1
        what = f"unacceptable character U+{error.character:04X}"
    else:
        mark = error.problem_mark
        assert mark is not None, "all errors of reading have a place"
        line, column = mark.line, mark.column
        what = str(error.problem).removeprefix("but ")
        before = error.context_mark
        if error.context and error.context.startswith("found duplicate anchor") and before:
            what = f"{error.context.partition(';')[0]}, which is on line {before.line + 1} too"
        elif error.context and before and before.line < line and "while" in error.context:
            what += f" {error.context} that begins on line {before.line + 1}"
    remedy = next((f"; {remedy}" for said, remedy in _REMEDIES.items() if said in what), "")
    return f"{origin}:{line + 1}:{column + 1}: not valid YAML: {what}{remedy}"


# A config may have so many bytes, values and open brackets. PyYAML reaches Python's limit of recursion with fewer.
MOST_BYTES = 1 << 20
MOST_VALUES = 50_000
MOST_DEPTH = 1000
_BRACKETS = re.compile(r"[\[\]{}]")
# A preset's name, a path, or the content of a config file.
Given = str | Mapping[str, Any]
# By dotted key, the file and line, or the argument, that gave it.
Places = dict[str, str]


class _Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number, and `0_5` and `0.5_5` as text: with an underscore they are bands, low_high."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build the value of a node. Raises ConstructorError, with its place, also for a date such as 2026-13-01."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise ConstructorError(None, None, f"{node.value} is no value ({error})", node.start_mark) from error


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


# PyYAML matches it at the start only, so it has to name its end.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+0123456789"])


def _number_or_band(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    if "_" in node.value:
        return node.value
    return loader.construct_yaml_float(node) if node.tag.endswith("float") else loader.construct_yaml_int(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number_or_band)


def preset_names() -> list[str]:
    """List the presets, which ``--config`` accepts by name."""
    folder = resources.files("rl_async.configs").joinpath("presets")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_config(
    name_or_path: Given | None, overrides: Sequence[str] = (), *, mode: str | None = None, name: str = ""
) -> RunConfig:
    """Read a preset, a YAML file or a mapping, if one is given, apply overrides in order, and check the result.

    Raises ConfigError for unknown keys (naming the nearest valid one), wrong types and impossible combinations.
    """
    config = _assembled(*_start(name_or_path), overrides, mode, name)
    check(config)
    return config


def load_with_refusals(name_or_path: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
    """Read a preset or a file as ``load_config`` does, and list the rules that it breaks instead of raising for them.

    Raises ConfigError if it is not a config at all, as with unknown keys and values of a wrong type.
    """
    config = _assembled(*_start(name_or_path), overrides)
    return config, list(problems(config))


def _start(name_or_path: Given | None) -> tuple[dict[str, Any], Places]:
    """Return the values of a preset, file or mapping, if one is given, and the place of each."""
    places: Places = {}
    values = {} if name_or_path is None else _read(name_or_path, places)
    if isinstance(name_or_path, str):
        path = Path(name_or_path)
        # The complete config that ``launch`` wrote into a run folder has the folder's name.
        of_run = path.name == "config.yaml" and bool(values.get("name"))
        if of_run and path.absolute().parent.name == values["name"]:
            _forget_removed(values)
    return values, places


def _assembled(
    values: dict[str, Any], places: Places, overrides: Sequence[str], mode: str | None = None, name: str = ""
) -> RunConfig:
    for override in overrides:
        _apply(values, override, places)
    if mode is not None:
        values["mode"] = mode
    if name:
        values["name"] = name
    return _convert(values, places)


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the complete config that ``dump`` wrote into a run folder, also that of an earlier version."""
    if not path.is_file():
        raise ConfigError(f"no file {path}; a run folder holds the config.yaml that `rl-async launch` wrote")
    places: Places = {}
    values = _read(str(path), places)
    _forget_removed(values)
    config = _assembled(values, places, overrides)
    check(config)
    return config


def _forget_removed(values: dict[str, Any]) -> None:
    """Delete or group the keys that a complete config of an earlier version has and this version does not.

    Logs those whose value differs from the one that always holds now.
    """
    for place, group, names, absent in GROUPED:
        section = _section_of(values, place)
        old = {name: section.pop(name) for name in names if name in section}
        if any(old.get(name, value) != value for name, value in absent.items()):
            section[group] = {names[name]: value for name, value in old.items() if names[name]}
    shaping = _section_of(values, "algorithm.shaping")
    if shaping.get("dynamic_sampling") is True and shaping.get("max_refills", MAX_REFILLS) != MAX_REFILLS:
        shaping["dynamic_sampling"] = shaping.pop("max_refills")
    sync = _section_of(values, "weight_sync")
    if isinstance(added := sync.get("adapters"), bool):
        sync["adapters"] = "add" if added else "auto"
    way = [sync.pop("transport")] if "transport" in sync else []
    way += [option for option in ("staged", "delta") if sync.pop(option, False)]
    if (waves := sync.pop("waves", 1)) > 1:
        way.append("waves")
        if waves > 2:
            log.warning("config of the run: weight_sync.waves=%s was removed; there are two waves now", waves)
    if way:
        sync["way"] = way if len(way) > 1 else way[0]
    trainer = _section_of(values, "trainer")
    if trainer.pop("compile", False):
        trainer["kernels"] = "compile"
    for key, now in DROPPED.items():
        place, _, leaf = key.rpartition(".")
        section = _section_of(values, place)
        if leaf not in section:
            continue
        if (was := section.pop(leaf)) != now:
            log.warning("config of the run: %s=%s was removed; %s holds now", key, was, now)
    _forget_unread_options(values)


def _section_of(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the section at a dotted key, or an empty one if it is absent."""
    section: Any = values
    for name in key.split("."):
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _forget_unread_options(values: dict[str, Any]) -> None:
    """Delete the options that the chosen formulas do not read."""
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, dict):
        return
    default = AlgorithmConfig()
    names = [str(algorithm.get(key, getattr(default, key))) for key in ("advantage", "loss", "correction")]
    for section, read in read_options(*names).items():
        if isinstance(options := algorithm.get(section), dict):
            algorithm[section] = {name: value for name, value in options.items() if name in read}


def refusals(values: dict[str, Any]) -> list[str]:
    """List all reasons to refuse the content of a config file. Paths that are missing are taken as given."""
    found: list[str] = []
    values = copy.deepcopy(_merge({"model": {"path": "-"}, "data": {"path": "-"}}, values))
    while True:
        try:
            return [*found, *problems(_convert(values, {}))]
        except ConfigError as error:
            found.append(str(error).removeprefix("config: "))
            # The conversion names one key at a time, which is left out to find the next.
            named = re.match(r"unknown key '([\w.]+)'|([\w.]+)[:\[]", found[-1])
            if named is None or not _without(values, named[1] or named[2]):
                return found


def _without(values: dict[str, Any], key: str) -> bool:
    """Remove a dotted key. Return False if it is not there."""
    *sections, leaf = key.split(".")
    for section in sections:
        if not isinstance(values := values.get(section, {}), dict):
            return False
    return values.pop(leaf, None) is not None


def dump(config: RunConfig) -> str:
    """Write the complete config as YAML that ``load_resolved`` reads back.

    Absent sections, such as `critic`, are left out, as are options that the chosen formulas do not read and those that
    leave a value as the correction's preset has it.
    """
    values = msgspec.to_builtins(config)
    _forget_unread_options(values)
    options = values["algorithm"]["correction_options"]
    values["algorithm"]["correction_options"] = {key: value for key, value in options.items() if value is not None}
    _forget_absent_sections(values, "")
    return dump_values(values)


def _forget_absent_sections(values: dict[str, Any], prefix: str) -> None:
    """Delete the sections that are null."""
    for key, value in list(values.items()):
        if struct_at(f"{prefix}{key}") is None:
            continue
        if value is None:
            del values[key]
        elif isinstance(value, dict):
            _forget_absent_sections(value, f"{prefix}{key}.")


def dump_values(values: dict[str, Any]) -> str:
    """Write sections and values as YAML that ``load_config`` reads back. Raises ConfigError for other types' values."""
    try:
        return yaml.dump(values, Dumper=_Dumper, sort_keys=False)
    except RepresenterError as error:
        raise ConfigError(f"no config has {error.args[-1]!r:.80}, a {type(error.args[-1]).__name__}") from error


def read_text(path: Path, place: str = "") -> str:
    """Return the text of a config, or of another project's. Raises ConfigError, naming the ``place`` and the file."""
    try:
        # A link may lead to a device that never ends.
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{place}{path}: more than {MOST_BYTES} bytes are no config")
        return io.TextIOWrapper(io.BytesIO(content), "utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}cannot read {path}: {error}") from error


def parse(text: str, origin: str) -> Any:
    """Read YAML as config files are read. Raises ConfigError, naming ``origin``."""
    return _parse(text, origin)[0]


def _read(name_or_path: Given, places: Places, extended_by: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a preset, file or mapping. A key ``extends: NAME`` at its top names a preset or file to be changed by it.

    ``extended_by``: the presets and files that were read on the way here.
    """
    if isinstance(name_or_path, Mapping):
        # Overrides are applied in place.
        own = copy.deepcopy(dict(name_or_path))
        extended = own.pop("extends", None)
        return own if extended is None else _merge(_read(str(extended), places), own)
    if name_or_path in extended_by:
        circle = " -> ".join((*extended_by, name_or_path))
        raise ConfigError(
            f"{extended_by[-1]}: extends: {circle} is a circle; one of them must extend a preset, or nothing"
        )
    text, origin = _find(name_or_path)
    values, node = _parse(text, origin)
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{origin}: expected sections such as `trainer:`, found {_kind(values)}")
    parent = values.pop("extends", None)
    base = _read(str(parent), places, (*extended_by, name_or_path)) if parent is not None else {}
    places.update({key: f"{origin}:{line}" for key, line in _lines(node, "")})
    return _merge(base, values)


def _kind(values: Any) -> str:
    return "nothing" if values is None else type(values).__name__


def _parse(text: str, origin: str) -> tuple[Any, yaml.Node | None]:
    """Parse YAML into plain values and the node tree, which has line numbers. Raises ConfigError, naming ``origin``."""
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{origin}: more than {MOST_BYTES} characters are no config")
    _refuse_deep(text, origin)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _refuse_bomb(node, origin)
        _refuse_repetition(node, origin, set())
        return (None if node is None else loader.construct_document(node)), node
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply") from error
    except (yaml.MarkedYAMLError, ReaderError) as error:
        raise ConfigError(explain_mistake(error, text, origin)) from error


def _refuse_deep(text: str, origin: str) -> None:
    """Raise ConfigError if more brackets are open at once than PyYAML can read; it takes their square in time.

    Brackets in quotes count, too, which no config comes near.
    """
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MOST_DEPTH:
            raise ConfigError(f"{origin}: nested too deeply")


def _refuse_bomb(node: yaml.Node | None, origin: str) -> None:
    """Raise ConfigError if aliases make a value part of itself, or stand for more than MOST_VALUES in all."""
    # By the id of a node; 0 while its values are being counted.
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 0
            of_mapping = isinstance(node, yaml.MappingNode)
            sizes[id(node)] = 1 + sum(map(size, chain.from_iterable(node.value) if of_mapping else node.value))
        elif sizes[id(node)] == 0:
            raise ConfigError(f"{origin}:{node.start_mark.line + 1}: a value is part of itself, by an alias")
        return sizes[id(node)]

    if node is not None and size(node) > MOST_VALUES:
        raise ConfigError(f"{origin}: more than {MOST_VALUES} values, counting what aliases stand for")


def _refuse_repetition(node: yaml.Node | None, origin: str, seen: set[int]) -> None:
    """Raise ConfigError if a key stands twice in a mapping, since YAML's reader would take the last.

    ``seen`` has the ids of the nodes above and before: an alias may stand inside its own value.
    """
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for item in node.value:
        key, value = item if isinstance(node, yaml.MappingNode) else (None, item)
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(f"{origin}:{line}: the key {key.value} stands on line {lines[key.value]} already")
            lines[key.value] = line
        _refuse_repetition(value, origin, seen)


def _find(name_or_path: str) -> tuple[str, str]:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.parent != Path("."):
        if not path.is_file():
            close = difflib.get_close_matches(str(path), [str(other) for other in path.parent.glob("*.y*ml")], n=1)
            raise ConfigError(f"--config: no file {path}{f'; did you mean {close[0]}?' if close else ''}")
        return read_text(path, "--config: "), str(path)
    if name_or_path not in preset_names():
        hint = nearest(name_or_path, preset_names())
        raise ConfigError(f"--config: no preset {name_or_path!r}{hint}; `rl-async config list` shows all")
    file = f"{name_or_path}.yaml"
    return resources.files("rl_async.configs").joinpath("presets", file).read_text(), file


def _lines(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield each dotted key with its line, counted from 1."""
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        yield path, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, f"{path}.")


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _apply(values: dict[str, Any], override: str, places: Places) -> None:
    """Set the key of an override ``a.b=c`` in ``values``, creating missing sections."""
    place = f"argument {override!r}"
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
        raise ConfigError(f"{place}: overrides are written a.b=c, e.g. trainer.steps=10")
    value, _ = _parse(text, place)
    _refuse_unknown(key, place)
    *sections, leaf = key.split(".")
    target = values
    for section in sections:
        inner = target.get(section)
        if not isinstance(inner, dict):
            inner = target[section] = {}
        target = inner
    target[leaf] = value
    places[key] = place


def _refuse_unknown(key: str, place: str) -> None:
    """Raise ConfigError for a key that does not exist, naming its replacement or the nearest key that does."""
    parent, _, leaf = key.rpartition(".")
    names = field_names(parent)
    if leaf in names:
        return
    if moved := replacement(key):
        raise ConfigError(f"{place}: unknown key {key!r}{moved}")
    foreign = key_hint(key, field_at)
    if not foreign and struct_at(parent) is None:
        _refuse_unknown(parent, place)
        raise ConfigError(f"{place}: {parent} is a single value, not a section")
    raise ConfigError(f"{place}: unknown key {key!r}{foreign or nearest(leaf, names, key.removesuffix(leaf))}")


def _convert(values: dict[str, Any], places: Places) -> RunConfig:
    """Convert to a RunConfig. Raises ConfigError with the place of the key whose value does not fit."""
    _refuse_unknown_keys(values, "", places)
    try:
        return msgspec.convert(_at_home(values), RunConfig, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`").lstrip(".") or "the config"
        dotted = re.sub(r"\[\d*\.*\]", "", key)
        wrong = re.fullmatch(r"Invalid enum value '(.*)'", message)
        hint = (foreign_hint(dotted, wrong[1]) or nearest(wrong[1], choices(dotted))) if wrong else ""
        if re.match(r"Expected .*`(?:array|object)", message) and field_at(dotted) is not None:
            form = ", as in [{name: path.py:function}]" if dotted == "reward.functions" else ""
            hint = f" ({dotted}: {key_text(dotted).type}{form})"
        raise ConfigError(f"{_place(dotted, places)}: {key}: {message[0].lower()}{message[1:]}{hint}") from error


def _at_home(value: Any, depth: int = 8) -> Any:
    """Replace the `~/` at the start of texts, which shells leave alone in ``key=~/file``, by the home directory."""
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    # No path stands deeper, and foreign mappings may contain themselves.
    if depth and isinstance(value, dict):
        return {key: _at_home(below, depth - 1) for key, below in value.items()}
    if depth and isinstance(value, list):
        return [_at_home(below, depth - 1) for below in value]
    return value


def _refuse_unknown_keys(values: dict[str, Any], section: str, places: Places) -> None:
    """Raise ConfigError for the first key of ``values``, which is the ``section``, that does not exist."""
    names = field_names(section)
    for name, value in values.items():
        key = f"{section}.{name}" if section else f"{name}"
        if name not in names:
            _refuse_unknown(key, places.get(key, "config"))
        if isinstance(value, dict) and struct_at(key) is not None:
            _refuse_unknown_keys(value, key, places)


def _place(key: str, places: Places) -> str:
    """Return where ``key``, or the nearest section around it, was given."""
    while key:
        if key in places:
            return places[key]
        key = key.rpartition(".")[0]
    return "config"


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of a nested mapping, such as ``trainer.steps``, with its value."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


FORMULAS = """\
r = pi/mu of a sampled token, and R its product over the tokens of a sequence, where mu sampled the token.
  decoupled   pi is the policy when the step began, pi_old, by one more forward pass; the loss clips pi_theta/pi_old
  bypass      pi_old := mu, no such pass; the loss clips pi_theta/mu, and r = pi_theta/mu as training goes on
What a correction may do, each by algorithm.correction_options.KEY (null: as the preset has it):
  weight      none: w = 1; token: w = r; sequence: w = R for all its tokens. log r and log R are cut at +-20
  cap         truncated importance sampling (TIS): min(w, cap)
  band        IcePop: w becomes 0 outside low_high; the token still counts in the loss's mean
  normalise   w over its mean over the batch's sampled tokens, or rows for weight=sequence
  reject      masks what breaks a rule; {LEVEL_MEASURE: limit}, all must be met
              level    token, or a whole sequence by seq_sum, seq_mean, seq_max of the measure
              measure  k1: r itself, kept inside low_high (seq_sum: R; seq_mean: geometric mean; seq_max: every r);
                       k2: log(r)^2 / 2, k3: r - 1 - log r, kept up to the limit
  veto        masks a sequence with any r below it
  max_age     masks tokens more steps old than this
  age_weights w times the factor of the token's age in steps"""

_MEASURE = {"k1": "r", "k2": "k2", "k3": "k3"}


def describe(correction: Correction) -> str:
    """Describe a correction in one line, with its numbers."""
    parts = ["decoupled" if correction.proximal == "recompute" else "bypass"]
    if correction.loss is not None:
        parts.append(f"loss {correction.loss}")
    parts += [_weight(correction)] if correction.weight != "none" else []
    parts += ["over its mean"] if correction.normalise else []
    parts += [_rejection(rule, *limits(rule, limit)) for rule, limit in correction.reject.items()]
    parts += [f"masks sequences with any r < {correction.veto:g}"] if correction.veto is not None else []
    parts += [f"masks tokens over {correction.max_age} steps old"] if correction.max_age is not None else []
    if correction.age_weights:
        parts.append("times " + ", ".join(f"{factor:g}" for factor in correction.age_weights) + ", … by age")
    return "; ".join(parts if len(parts) > 1 else [*parts, "no weights, nothing masked"])


def explanation() -> str:
    """Explain the modes, formulas and all presets."""
    width = max(map(len, PRESETS))
    table = "\n".join(f"  {name:<{width}}  {describe(correction)}" for name, correction in PRESETS.items())
    return f"{FORMULAS}\nPresets:\n{table}"


def _weight(correction: Correction) -> str:
    ratio = "r" if correction.weight == "token" else "R"
    if correction.cap is not None:
        return f"w = min({ratio}, {correction.cap:g})"
    if correction.band is not None:
        low, high = band(correction.band)
        return f"w = {ratio}, 0 outside [{low:g}, {high:g}]"
    return f"w = {ratio}"


def _rejection(rule: str, low: float, high: float) -> str:
    level, _, measure = rule.rpartition("_")
    kept = f"in [{low:g}, {high:g}]" if measure == "k1" else f"up to {high:g}"
    if level == "token":
        return f"keeps tokens with {_MEASURE[measure]} {kept}"
    of = {"seq_sum": "sum", "seq_mean": "mean", "seq_max": "largest"}[level]
    what = f"{of} {_MEASURE[measure]}"
    if measure == "k1":
        what = {"seq_sum": "R", "seq_mean": "geometric mean of r", "seq_max": "every r"}[level]
    return f"keeps sequences with {what} {kept}"


@dataclass(frozen=True)
class KeyText:
    """What a key means, its type with its bounds, and its default, as a reader sees them."""

    meaning: str
    type: str
    default: str


# Keys whose explanation goes on below type and default.
MORE: dict[str, Callable[[], str]] = {"algorithm.correction": explanation}


def _struct(kind: inspect.Type) -> inspect.StructType | None:
    """Return the struct that a type is or, for an optional, contains."""
    if isinstance(kind, inspect.Metadata):
        return _struct(kind.type)
    if isinstance(kind, inspect.UnionType):
        return next((s for s in map(_struct, kind.types) if s is not None), None)
    return kind if isinstance(kind, inspect.StructType) else None


@functools.cache
def _root() -> inspect.StructType | None:
    """Return the type of the whole config, cached: every look-up starts here, and inspecting it takes milliseconds."""
    return _struct(inspect.type_info(RunConfig))


def struct_at(key: str) -> inspect.StructType | None:
    """Return the struct at a dotted key ('' is the whole config), or None for a section that does not exist."""
    current = _root()
    for part in key.split(".") if key else ():
        field = next((f for f in current.fields if f.name == part), None) if current else None
        current = _struct(field.type) if field else None
    return current


def field_at(key: str) -> inspect.Field | None:
    """Return the field of a dotted key, or None for a key that does not exist."""
    parent, _, leaf = key.rpartition(".")
    struct = struct_at(parent)
    return next((f for f in struct.fields if f.name == leaf), None) if struct else None


def field_names(section: str) -> list[str]:
    """List the keys of a section; a section that does not exist has none."""
    struct = struct_at(section)
    return [field.name for field in struct.fields] if struct else []


def choices(key: str) -> list[str]:
    """List the values of a key that takes one of several names, directly, in a list or beside other types."""
    field = field_at(key)
    return list(dict.fromkeys(str(value) for value in _literals(field.type))) if field else []


def _literals(kind: inspect.Type) -> list[Any]:
    kind, _ = _unwrap(kind)
    if isinstance(kind, inspect.UnionType):
        return [value for inner in kind.types for value in _literals(inner)]
    if isinstance(kind, inspect.VarTupleType):
        return _literals(kind.item_type)
    return list(kind.values) if isinstance(kind, inspect.LiteralType) else []


def all_keys(prefix: str = "") -> list[str]:
    """List every dotted key below ``prefix``, sections before their keys."""
    keys = []
    for name in field_names(prefix):
        key = f"{prefix}.{name}" if prefix else name
        keys += [key, *all_keys(key)]
    return keys


def explain(key: str) -> str:
    """Describe a key with its type, default and bounds, or a section with one line per key; without a key, name all.

    Raises ConfigError for a key that does not exist, naming the nearest ones.
    """
    if not key:
        return "\n".join(field_names(""))
    field = field_at(key)
    if field is None:
        raise ConfigError(f"unknown key {key!r}{replacement(key) or _suggestion(key)}")
    if struct_at(key) is not None:
        return f"{key}\n" + "\n".join(f"  {_line(f'{key}.{name}')}" for name in field_names(key))
    text = key_text(key)
    more = f"\n\n{MORE[key]()}" if key in MORE else ""
    return f"{key}\n  {text.meaning}\n  type: {text.type}\n  default: {text.default}{more}"


def key_text(key: str) -> KeyText:
    """Describe a key that exists; a section's default is `(section)`, or `null` where it may be absent."""
    field = field_at(key)
    assert field is not None, key
    kind, meaning = _unwrap(field.type)
    default = _default(field)
    if struct_at(key) is not None:
        default = "null" if default == "null" else "(section)"
    return KeyText(meaning, _type_name(kind), default)


def _suggestion(key: str) -> str:
    leaf = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, all_keys(), n=3, cutoff=0.5)
    close += [k for k in all_keys() if k.rpartition(".")[2] == leaf and k not in close]
    return f"; did you mean {' or '.join(close)}?" if close else "; `rl-async config explain` lists the sections"


def _line(key: str) -> str:
    field = field_at(key)
    assert field is not None
    return f"{field.name:<26} {_default(field):<22} {_unwrap(field.type)[1]}"


def _unwrap(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """Strip the annotations off a type; return it with the outermost description."""
    description = ""
    while isinstance(kind, inspect.Metadata):
        description = description or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return kind, description


def _default(field: inspect.Field) -> str:
    if field.required:
        return "(required)"
    if field.default is not msgspec.NODEFAULT:
        return _show(field.default)
    return _show(field.default_factory())


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(msgspec.to_builtins(value))


def _type_name(kind: inspect.Type) -> str:
    kind, _ = _unwrap(kind)
    if isinstance(kind, inspect.LiteralType):
        return " | ".join(str(v) for v in kind.values)
    if isinstance(kind, inspect.UnionType):
        return " | ".join(_type_name(t) for t in kind.types)
    if isinstance(kind, inspect.StructType):
        return "{" + ", ".join(f.name for f in kind.fields) + "}"
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return f"list of {_type_name(kind.item_type)}"
    names = {"IntType": "whole number", "FloatType": "number", "StrType": "text", "BoolType": "true | false"}
    name = names.get(type(kind).__name__, type(kind).__name__.removesuffix("Type").lower())
    bounds = [
        f"{sign} {limit:g}"
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if (limit := getattr(kind, attribute, None)) is not None
    ]
    return " ".join([name, *bounds])
