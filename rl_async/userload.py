"""Loads users' functions and classes, given as ``path.py:name`` or ``package.module:name``."""

import importlib
import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_async.errors import ConfigError


def is_user_reference(name: str) -> bool:
    """Whether ``name`` points at user code rather than at something built in."""
    return ":" in name


def raised_at(error: BaseException) -> str:
    """Return the file and line that raised ``error``, the innermost of its traceback."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else "?"


def find_neighbours(folder: Path = Path()) -> None:
    """Let users' code import modules of ``folder`` and of the working directory.

    They are searched last, so that no file there is imported in place of an installed module.
    """
    for place in (str(folder.resolve()), str(Path.cwd())):
        if place not in sys.path:
            sys.path.append(place)


def load_user_object(reference: str, key: str) -> Any:
    """Load the object that ``reference`` names.

    Raises ConfigError naming the config key ``key``, and the missing file, module or name.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{key}: {reference!r} is not path.py:name or package.module:name")
    find_neighbours(Path(place).parent if place.endswith(".py") else Path())
    if place.endswith(".py"):
        module = _load_file(Path(place), reference, key)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{key}: cannot import {place!r} of {reference!r}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}: {place} has no {name!r}")
    return getattr(module, name)


def _load_file(path: Path, reference: str, key: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{key}: no file {path} (from {reference!r}); paths are relative to the working directory")
    module_name = f"rl_async_user_{path.resolve().as_posix().replace('/', '_').replace('.', '_')}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with ExitStack() as undo:
        sys.modules[module_name] = module
        # The next call must not find a partly loaded module.
        undo.callback(sys.modules.pop, module_name)
        try:
            spec.loader.exec_module(module)
        except SyntaxError as error:
            raise ConfigError(f"{key}: {path}:{error.lineno}: {error.msg}") from error
        undo.pop_all()
    return module
