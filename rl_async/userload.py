"""Loads users' functions and classes, given as ``path.py:name`` or ``package.module:name``.

``refer_to`` makes such a reference to an object of this process, for the processes of a run, which load it.
"""

import __future__

import ast
import builtins
import importlib
import importlib.util
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import CodeType
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


# Characters of a user's error that are passed on.
MOST_SAID = 2000


def told(error: BaseException) -> str:
    """Describe an error of users' code by its class and the beginning of its text, in encodable characters."""
    try:
        text = str(error)[:MOST_SAID]
    # A class of the user's may fail to say what happened.
    except Exception as another:
        text = f"its text raised {type(another).__name__}"
    return encodable(f"{type(error).__name__}: {text}")


def encodable(text: str) -> str:
    """Return the text with a question mark for each half of a surrogate pair, which no message can carry."""
    return text.encode(errors="replace").decode()


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


# --- references to objects of a notebook or a script


def refer_to(given: Any, folder: Path, key: str) -> tuple[str, str]:
    """Return a reference to a function or class, and the source that must stand in the file that it names.

    The source is empty for what can be imported. Functions and classes of a notebook, of the script that runs, or of a
    function's body are sent by their source, to be written into ``folder``: other processes cannot import a notebook,
    and importing the script would run it again. Raises ConfigError, naming ``key`` and the variable, if the source
    alone would not do.
    """
    name = str(getattr(given, "__name__", type(given).__name__))
    module = sys.modules.get(str(getattr(given, "__module__", "")))
    if module is not None and module.__name__ != "__main__" and getattr(module, name, None) is given:
        file = str(getattr(module, "__file__", ""))
        is_single = "." not in module.__name__ and not hasattr(module, "__path__")
        return (f"{file}:{name}" if is_single and file.endswith(".py") else f"{module.__name__}:{name}"), ""
    codes = list(_codes(given))
    if name == "<lambda>":
        raise ConfigError(f"{key}: a lambda cannot be sent to the run; define the function with `def`")
    if not codes:
        kind = "is a class without methods" if inspect.isclass(given) else f"is a {type(given).__name__}"
        raise ConfigError(f"{key}: {name} {kind}, not a function")
    to_file = f'put {name} into a file and pass "file.py:{name}"'
    for variable in {variable for code in codes for variable in code.co_freevars} - {"__class__"}:
        raise ConfigError(
            f"{key}: {name} uses {variable!r} of the function around it; define {variable!r} inside {name}, or "
            f"{to_file}"
        )
    try:
        source = _source_of_class(name, codes[0]) if inspect.isclass(given) else inspect.getsource(given)
    except (OSError, TypeError) as error:
        raise ConfigError(f"{key}: the source of {name} cannot be read ({error}); {to_file}") from error
    source = textwrap.dedent(source)
    space = {} if module is None else vars(module)
    imports = []
    for used in sorted(_names_used(source) - {name} - set(dir(builtins)) - {"__name__", "__file__", "__doc__"}):
        if used not in space:
            raise ConfigError(f"{key}: {name} uses {used!r}, which is not defined")
        if not (found := _imports(used, space[used], source)):
            raise ConfigError(
                f"{key}: {name} uses {used!r}, which exists only in this program; define {used!r} inside {name}, or "
                f"{to_file}"
            )
        imports += found
    if codes[0].co_flags & __future__.annotations.compiler_flag:
        imports.insert(0, "from __future__ import annotations")
    head = f"# {name} of the program that started the run, as it was then; rl_async.launch wrote this file."
    return f"{folder / name}.py:{name}", "\n".join([head, *imports, "", "", source])


def _codes(given: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of the methods that a class defines itself."""
    if inspect.isclass(given):
        for value in vars(given).values():
            yield from _codes(getattr(value, "__func__", getattr(value, "fget", value)))
    elif inspect.isfunction(given):
        yield inspect.unwrap(given).__code__


def _source_of_class(name: str, code: CodeType) -> str:
    """Return the source of the class around a method. ``inspect`` knows none of a notebook's classes."""
    lines = linecache.getlines(code.co_filename)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ClassDef) and node.name == name and node.end_lineno is not None:
            first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            if first <= code.co_firstlineno <= node.end_lineno:
                return "".join(lines[first - 1 : node.end_lineno])
    raise OSError(f"{code.co_filename} has no class {name}")


def _imports(used: str, value: Any, source: str) -> list[str]:
    """Return the imports that give ``source`` the object that it calls ``used``; none if no import can."""
    if inspect.ismodule(value):
        package = value.__name__
        # After ``import a.b`` the code has a name for ``a`` alone.
        chains = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
        inner = {f"{package}{chain.removeprefix(used)}" for chain in chains if chain.startswith(f"{used}.")}
        own = f"import {package}" if package == used else f"import {package} as {used}"
        return [own, *(f"import {module}" for module in sorted(inner & sys.modules.keys()))]
    home, name = str(getattr(value, "__module__", "")), str(getattr(value, "__name__", ""))
    if home == "__main__" or not name or getattr(sys.modules.get(home), name, None) is not value:
        return []
    return [f"from {home} import {name}" if name == used else f"from {home} import {name} as {used}"]


def _names_used(source: str) -> set[str]:
    """Return the names that the code takes from its module, at any depth."""
    found, tables = set[str](), [symtable.symtable(source, "<source>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return found
