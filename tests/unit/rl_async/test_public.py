"""The names that users import from ``rl_async``."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rl_async

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
