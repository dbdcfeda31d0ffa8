"""References to functions and classes of a program: a file, a module, or the source of an object that has neither."""

import importlib.util
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rl_async.errors import ConfigError
from rl_async.userload import load_user_object, refer_to

CELLS = count()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Run a cell as a notebook's kernel does: in ``__main__``, with its source in ``linecache``."""
    space = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", space)
    files = []

    def run(cell: str) -> dict[str, Any]:
        files.append(f"<cell {next(CELLS)}>")
        linecache.cache[files[-1]] = (len(cell), None, cell.splitlines(keepends=True), files[-1])
        exec(compile(cell, files[-1], "exec"), vars(space))
        return vars(space)

    yield run
    for file in files:
        linecache.cache.pop(file, None)


def sent(given: Any, folder: Path) -> Any:
    """The object as another process loads it."""
    reference, source = refer_to(given, folder, "reward.functions")
    path, _, name = reference.rpartition(":")
    assert Path(path).parent == folder and source
    Path(path).write_text(source)
    return load_user_object(f"{path}:{name}", "reward.functions")


def test_a_notebooks_function_is_sent_with_its_imports(notebook: Any, tmp_path: Path) -> None:
    cells = notebook(
        "import re\nimport urllib.parse\nimport collections as c\nfrom pathlib import PurePath as P\n"
        "def reward(solution_str: str) -> float:\n"
        "    words = c.Counter(re.split(' ', urllib.parse.quote(solution_str)))\n"
        "    return float(len(words)) + len(P('a/b').parts)\n"
    )
    loaded = sent(cells["reward"], tmp_path)
    assert loaded is not cells["reward"]
    assert loaded("a b") == cells["reward"]("a b") == 3.0


def test_names_of_the_function_itself_need_no_import(notebook: Any, tmp_path: Path) -> None:
    cells = notebook(
        "def reward(solution_str, limit=3):\n"
        "    def inner(n):\n        return n if n <= limit else reward('', limit)\n"
        "    return sum(inner(len(part)) for part in [solution_str])\n"
    )
    assert sent(cells["reward"], tmp_path)("ab") == 2


def test_a_notebooks_class_is_sent(notebook: Any, tmp_path: Path) -> None:
    """``inspect`` finds the source of none."""
    cells = notebook(
        "from rl_async import Environment, Step\n\n"
        "class Guess(Environment):\n"
        "    def __init__(self, task):\n        super().__init__()\n        self.task = task\n"
        "    def step(self, answer):\n        return Step(done=answer == self.task)\n\nafter = 1\n"
    )
    assert sent(cells["Guess"], tmp_path)("x").step("x").done


def test_postponed_annotations_stay_so(notebook: Any, tmp_path: Path) -> None:
    cells = notebook(
        "from __future__ import annotations\nimport fractions\n"
        "def reward(solution_str: 'str | None') -> fractions.Fraction:\n    return fractions.Fraction(1, 2)\n"
    )
    assert sent(cells["reward"], tmp_path).__annotations__["return"] == "fractions.Fraction"


@pytest.mark.parametrize(
    ("cell", "variable"),
    [
        ("limit = 3\ndef f(solution_str):\n    return limit\n", "limit"),
        ("limit = 3\ndef f(solution_str, n=limit):\n    return n\n", "limit"),
        ("total = 0\ndef f(solution_str):\n    global total\n    total += 1\n    return total\n", "total"),
        ("def helper():\n    return 1\ndef f(solution_str):\n    return [helper() for _ in range(2)]\n", "helper"),
        ("def keep(g):\n    return g\n@keep\ndef f(solution_str):\n    return 1\n", "keep"),
        ("def make(limit):\n    def f(solution_str):\n        return limit\n    return f\nf = make(3)\n", "limit"),
        ("def f(solution_str):\n    return missing\n", "missing"),
        ("class Base:\n    def a(self):\n        pass\nclass f(Base):\n    def b(self):\n        pass\n", "Base"),
    ],
)
def test_a_variable_of_the_notebook_is_refused_by_name(notebook: Any, cell: str, variable: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.functions.*'{variable}'"):
        refer_to(notebook(cell)["f"], tmp_path, "reward.functions")


@pytest.mark.parametrize("given", [lambda solution_str: 1.0, 3.5, [].append, object(), type("Bare", (), {})])
def test_what_is_no_function_is_refused(given: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions"):
        refer_to(given, tmp_path, "reward.functions")


def test_a_function_without_source_is_refused(tmp_path: Path) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def reward(solution_str):\n    return 1.0\n", space)
    with pytest.raises(ConfigError, match=r"reward\.functions.*reward\.py|reward\.functions.*reward"):
        refer_to(space["reward"], tmp_path, "reward.functions")


def test_a_function_of_a_file_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_rewards_of_this_test.py"
    file.write_text("limit = 3\ndef reward(solution_str):\n    return limit\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    assert refer_to(module.reward, tmp_path, "reward.functions") == (f"{file}:reward", "")


def test_a_function_of_a_package_is_named_by_its_module(tmp_path: Path) -> None:
    """Loaded by its path, a module inside a package could not import its siblings."""
    assert refer_to(load_user_object, tmp_path, "x") == (f"{load_user_object.__module__}:load_user_object", "")
