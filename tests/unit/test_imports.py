"""Dependencies point one way, and heavy packages stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIDDLE = {"weight_sync", "transfer_queue", "rollout_server", "reward_loop"}
MAY_IMPORT = {
    "rl_async": set(),
    "configs": set(),
    "weight_sync": {"configs"},
    "transfer_queue": {"configs"},
    "reward_loop": {"configs"},
    "rollout_server": {"configs", "weight_sync"},
    "agent_loop": {"configs", *MIDDLE},
    "trainer": {"configs", *MIDDLE},
    "launcher": {"configs", *MIDDLE, "agent_loop", "trainer"},
}
HOME_OF = {
    "torch": {
        "trainer",
        "weight_sync",
        "rollout_server/embedded",
        "rollout_server/in_vllm",
        "reward_loop/server",
        "transfer_queue/torch_dataset.py",  # an IterableDataset, for those who read a queue without our trainer
    },
    "megatron": {"trainer"},
    "ray": {"launcher/on_ray.py"},
    "vllm": {"rollout_server/in_vllm"},
    "sglang": set(),
}
FILES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    composition_root = path.name == "__main__.py" or folder == "launcher"
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "rl_async" and len(parts) > 1 and parts[1] in MAY_IMPORT and parts[1] != folder:
            assert composition_root or parts[1] in MAY_IMPORT[folder], f"{path}: {folder} must not import {module}"
        if parts[0] in HOME_OF and not composition_root:
            where = path.relative_to(ROOT).as_posix()
            at_home = any(where == home or where.startswith(home + "/") for home in HOME_OF[parts[0]])
            assert at_home, f"{path}: {module}"


def test_only_one_file_imports_ray() -> None:
    assert [path.name for path in FILES if any(m.split(".")[0] == "ray" for m in imports(path))] == ["on_ray.py"]


def test_the_command_line_does_not_import_torch() -> None:
    tree = ast.parse((ROOT / "launcher" / "cli.py").read_text())
    top = {m for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for m in _names(node)}
    assert not {name for name in top if name.split(".")[0] in ("torch", "transformers", "zmq", "aiohttp", "pyarrow")}


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
