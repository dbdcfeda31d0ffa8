"""From a preset or a file, plus ``a.b=c`` arguments, to a checked RunConfig. Every mistake names where it stands."""

import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rl_async.configs.checks.rules import check
from rl_async.configs.load.fields import choices, field_names, struct_at
from rl_async.configs.load.renamed import replacement
from rl_async.configs.nearest import nearest
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError

Places = dict[str, str]  # dotted key -> where it was given: file:line, or the argument


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 0_5 as an octal 5 and 0.5_5 as 0.55; here they stay text, for they mean bands."""


def _number_or_band(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    if "_" in node.value:
        return node.value
    return loader.construct_yaml_float(node) if node.tag.endswith("float") else loader.construct_yaml_int(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number_or_band)


def preset_names() -> list[str]:
    """Names that ``--config`` accepts besides paths."""
    folder = resources.files("rl_async.configs.presets")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_config(
    name_or_path: str | None, overrides: Sequence[str] = (), *, mode: str | None = None, name: str = ""
) -> RunConfig:
    """Read a preset or a YAML file, if one is given, apply overrides in order, and check the result.

    Raises ConfigError for unknown keys (with the nearest valid one), wrong types and impossible combinations.
    """
    places: Places = {}
    values = {} if name_or_path is None else _read(name_or_path, places)
    for override in overrides:
        _apply(values, override, places)
    if mode is not None:
        values["mode"] = mode
    if name:
        values["name"] = name
    config = _convert(values, places)
    check(config)
    return config


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the complete config that ``dump`` wrote into a run folder."""
    if not path.is_file():
        raise ConfigError(f"no file {path}; a run folder holds the config.yaml that `rl-async launch` wrote")
    return load_config(str(path), overrides)


def dump(config: RunConfig) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _read(name_or_path: str, places: Places) -> dict[str, Any]:
    """Values of a preset or file. ``extends: NAME`` at the top names a preset whose values it changes."""
    text, origin = _find(name_or_path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{origin}: expected sections such as `trainer:`, found {type(values).__name__}")
    parent = values.pop("extends", None)
    base = _read(str(parent), places) if parent is not None else {}
    places.update({key: f"{origin}:{line}" for key, line in _lines(node, "")})
    return _merge(base, values)


def _find(name_or_path: str) -> tuple[str, str]:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.parent != Path("."):
        if not path.is_file():
            raise ConfigError(f"--config: no file {path}")
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config: cannot read {path}: {error}") from error
    if name_or_path not in preset_names():
        hint = nearest(name_or_path, preset_names())
        raise ConfigError(f"--config: no preset {name_or_path!r}{hint}; `rl-async config list` shows all")
    return resources.files("rl_async.configs.presets").joinpath(
        f"{name_or_path}.yaml"
    ).read_text(), f"{name_or_path}.yaml"


def _lines(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
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
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
        raise ConfigError(f"argument {override!r}: overrides are written a.b=c, e.g. trainer.steps=10")
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"argument {override!r}: the value is not valid YAML: {error}") from error
    if isinstance(value, str):
        value = _number(value)
    _refuse_unknown(key, f"argument {override!r}")
    *sections, leaf = key.split(".")
    target = values
    for section in sections:
        inner = target.get(section)
        if not isinstance(inner, dict):
            inner = target[section] = {}
        target = inner
    target[leaf] = value
    places[key] = f"argument {override!r}"


def _number(text: str) -> Any:
    """YAML 1.1 reads 1e-3 as a string; everyone who types it means a number."""
    if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text):
        return float(text)
    return text


def _refuse_unknown(key: str, place: str) -> None:
    """Raise ConfigError if no such key exists, naming what it is called now or the nearest key that exists."""
    if moved := replacement(key):
        raise ConfigError(f"{place}: unknown key {key!r}{moved}")
    parent, _, leaf = key.rpartition(".")
    if struct_at(parent) is None:
        _refuse_unknown(parent, place)
        raise ConfigError(f"{place}: {parent} is a single value, not a section")
    names = field_names(parent)
    if leaf not in names:
        raise ConfigError(f"{place}: unknown key {key!r}{nearest(leaf, names, key.removesuffix(leaf))}")


def _convert(values: dict[str, Any], places: Places) -> RunConfig:
    values = _numbers(values)
    for key in _keys(values, ""):
        _refuse_unknown(key, places.get(key, "config"))
    try:
        return msgspec.convert(values, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`").lstrip(".") or "the config"
        dotted = re.sub(r"\[\d*\.*\]", "", key)
        wrong = re.fullmatch(r"Invalid enum value '(.*)'", message)
        hint = nearest(wrong[1], choices(dotted)) if wrong else ""
        raise ConfigError(f"{_place(dotted, places)}: {key}: {message[0].lower()}{message[1:]}{hint}") from error


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    return _number(value) if isinstance(value, str) else value


def _keys(values: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict) and struct_at(f"{prefix}{key}") is not None:
            yield from _keys(value, f"{prefix}{key}.")


def _place(key: str, places: Places) -> str:
    """Where ``key``, or the nearest section around it, was given."""
    while key:
        if key in places:
            return places[key]
        key = key.rpartition(".")[0]
    return "config"
