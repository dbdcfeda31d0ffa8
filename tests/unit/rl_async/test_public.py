"""The names that users import from ``rl_async``."""

import ast
import importlib.util
import inspect
import json
import linecache
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import rl_async
from rl_async import installation
from rl_async.errors import ConfigError
from rl_async.userload import load_user_object, refer_to

NAMES = [name for names in rl_async.PUBLIC.values() for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring(name: str) -> None:
    value = getattr(rl_async, name)
    # A dataclass without one gets its signature.
    assert value.__name__ == name and not (value.__doc__ or name).startswith(name), name
    assert name in dir(rl_async)


def test_editors_read_the_same_list() -> None:
    (checked,) = (node for node in ast.parse(Path(rl_async.__file__).read_text()).body if isinstance(node, ast.If))
    imported = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    found = {(str(node.module), alias.name) for node in imported for alias in node.names}
    assert found == {(f"rl_async.{module}", name) for module, names in rl_async.PUBLIC.items() for name in names}
    # `A as A` exports a name; others are private to the package.
    assert all(alias.name == alias.asname for node in imported for alias in node.names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="lunch"):
        rl_async.lunch  # noqa: B018
    assert not hasattr(rl_async, "__path_of_nothing__")


def test_importing_the_package_imports_nothing() -> None:
    """And starting a run imports no torch."""
    code = "import sys; before = set(sys.modules); import rl_async; print(*set(sys.modules) - before, sep='\\n')"
    code += "; rl_async.launch; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert imported - set(sys.stdlib_module_names) == {"rl_async"}
    assert [name for name in done.stdout.split() if name.startswith("rl_async.")] == []


def test_the_reference_has_every_public_name() -> None:
    page = Path(__file__).parents[3] / "docs/site/python_api.py"
    space: dict[str, object] = {}
    exec(compile(page.read_text(), str(page), "exec"), space)
    objects = space["OBJECTS"]
    assert isinstance(objects, dict)
    listed = {name for names in objects.values() for name in names}
    homes = {f"rl_async.{module}.{name}" for module, names in rl_async.PUBLIC.items() for name in names}
    assert homes - listed == {name for name in homes if name.startswith("rl_async.errors.")}
    assert "rl_async.errors" in listed
    assert inspect.ismodule(sys.modules["rl_async"])


# References to functions and classes of a program: a file, a module, or the source of an object that has neither.


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


# Which rl-async is installed, and the command that installs the same beside an engine.


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Metadata of rl-async 7.8, found before those of the installation that runs the tests."""
    folder = tmp_path / "site" / "rl_async-7.8.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-async\nVersion: 7.8\n")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def came_from(installed: Path, **source: Any) -> list[str]:
    """Record the source as pip does; return the arguments of pip that install the same."""
    (installed / "direct_url.json").write_text(json.dumps(source))
    words = shlex.split(installation.install_beside("/a folder/python", *installation.BESIDE_ENGINES))
    assert words[:5] == ["/a folder/python", "-m", "pip", "install", "--no-deps"] and words[-1] == "xxhash"
    return words[5:-1]


def test_the_version_is_that_of_the_installation(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rl_async.__version__ == installation.version() == "7.8"
    left = tmp_path / "checkout" / "rl_async.egg-info"
    left.mkdir(parents=True)
    (left / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: rl-async\nVersion: 6\n")
    monkeypatch.syspath_prepend(left.parent)
    assert installation.version() == "7.8", "a build left these in a checkout"


def test_the_same_rl_async_comes_from_where_this_one_came(installed: Path, tmp_path: Path) -> None:
    words = shlex.split(installation.install_beside("python", *installation.BESIDE_ENGINES))
    assert words[5:-1] == ["rl-async==7.8"] and installation.commit() == ""
    place = tmp_path / "a folder"
    place.mkdir()
    assert came_from(installed, url=place.as_uri(), dir_info={"editable": True}) == ["--editable", str(place)]
    assert came_from(installed, url=place.as_uri(), dir_info={}) == [str(place)]
    address = "https://example.org/rl_async-7.8-py3-none-any.whl"
    assert came_from(installed, url=address, archive_info={}) == [f"rl-async @ {address}"]
    wheel = tmp_path / "rl_async-7.8-py3-none-any.whl"
    # A wheel that was deleted since cannot be installed again.
    assert came_from(installed, url=wheel.as_uri(), archive_info={}) == ["rl-async==7.8"]
    wheel.touch()
    assert came_from(installed, url=wheel.as_uri(), archive_info={}) == [str(wheel)]
    repository = {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert came_from(installed, **repository) == ["rl-async @ git+https://example.org/r.git@abc"]
    assert installation.commit() == "abc"


def test_the_commit_of_a_checkout_is_known_if_it_is_installed_editable(installed: Path, tmp_path: Path) -> None:
    place = tmp_path / "checkout"

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *who, *arguments], cwd=place, check=True, capture_output=True, text=True).stdout

    place.mkdir()
    git("init", "--quiet")
    (place / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message=first")
    came_from(installed, url=place.as_uri(), dir_info={})
    assert installation.commit() == "", "the checkout may have moved on since"
    came_from(installed, url=place.as_uri(), dir_info={"editable": True})
    head = git("rev-parse", "HEAD").strip()
    assert installation.commit() == head
    (place / "file").write_text("2")
    assert installation.commit() == f"{head}+changes"
    (place / ".git/HEAD").unlink()
    assert installation.commit() == ""
