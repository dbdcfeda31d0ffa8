"""Imports point one way between packages and inside them, and heavy packages stay where they belong."""

import ast
import functools
import re
import sys
from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rl_async import installation

ROOT = Path(__file__).parents[2]
MIDDLE = {"sandbox", "weight_sync", "transfer_queue", "rollout_server", "reward_loop"}
MAY_IMPORT: dict[str, set[str]] = {
    "rl_async": set(),
    "configs": set(),
    "weight_sync": {"configs"},
    "transfer_queue": {"configs"},
    "sandbox": {"configs"},
    "reward_loop": {"configs", "sandbox"},
    "rollout_server": {"configs", "weight_sync"},
    "agent_loop": {"configs", *MIDDLE},
    "trainer": {"configs", *MIDDLE},
    "insight": {"configs", *MIDDLE},
    "launcher": {"configs", *MIDDLE, "agent_loop", "trainer", "insight"},
}
HOME_OF = {
    "torch": {
        "trainer",
        "weight_sync",
        "rollout_server/embedded",
        "rl_async/torch_shared.py",  # what the engine and the trainer must compute alike
        "rollout_server/vllm/int8.py",  # these run inside vLLM's own process
        "rollout_server/vllm/plugin.py",
        "rollout_server/vllm/slices.py",
        "reward_loop/server",
        "transfer_queue/torch_dataset.py",  # an IterableDataset, for those who read a queue without our trainer
    },
    "megatron": {"trainer/megatron"},
    "ray": {"launcher/ray_nodes.py"},
    "vllm": {"rollout_server/vllm"},
    "sglang": set(),
}
FILES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def imports(path: Path, *, at_once: bool = False) -> frozenset[str]:
    """Every module that a file imports, at any depth of its code; ``at_once``: only those that importing it imports."""
    later = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If)  # if TYPE_CHECKING
    kept = [node for node in ast.parse(path.read_text()).body if not (at_once and isinstance(node, later))]
    found: set[str] = set()
    for node in (inner for outer in kept for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@pytest.fixture(scope="module")
def imported() -> dict[Path, frozenset[str]]:
    # The package's public names are looked up when they are used; it has their imports for editors alone.
    return {path: imports(path, at_once=path == ROOT / "rl_async" / "__init__.py") for path in FILES}


def our_files(modules: Set[str]) -> set[Path]:
    """The files of this project among ``modules``; a name inside a module counts as the module."""
    found = set()
    for module in modules:
        parts = module.split(".")
        if parts[0] == "rl_async":
            for end in (len(parts), len(parts) - 1):
                base = ROOT / "rl_async" / "/".join(parts[1:end])
                files = [base.with_suffix(".py"), base / "__init__.py"] if end > 1 else [base / "__init__.py"]
                if file := next((file for file in files if file.is_file()), None):
                    found.add(file.resolve())
                    break
    return found


def first_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """The nodes of one cycle, the first again at its end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_packages_import_one_way(imported: dict[Path, frozenset[str]]) -> None:
    for path, modules in imported.items():
        folder = path.relative_to(ROOT).parts[0]
        if folder == "launcher" or (path.name == "__main__.py" and folder != "transfer_queue"):
            continue  # composition roots
        used = {module.split(".")[1] for module in modules if module.startswith("rl_async.")} & set(MAY_IMPORT)
        assert used <= MAY_IMPORT[folder] | {folder}, f"{path}: {folder} must not import {used - MAY_IMPORT[folder]}"


def test_modules_import_one_way(imported: dict[Path, frozenset[str]]) -> None:
    graph = {str(path): {str(file) for file in our_files(modules)} for path, modules in imported.items()}
    assert first_cycle(graph) == []


def test_folders_import_one_way(imported: dict[Path, frozenset[str]]) -> None:
    """A folder is a node, with what stands directly in it; composition roots are nodes of their own."""
    graph: dict[str, set[str]] = {}
    for path, modules in imported.items():
        here = _node(path)
        graph.setdefault(here, set()).update({_node(file) for file in our_files(modules)} - {here})
    assert first_cycle(graph) == []


def test_heavy_packages_are_imported_at_home_alone(imported: dict[Path, frozenset[str]]) -> None:
    for path, modules in imported.items():
        where = path.relative_to(ROOT).as_posix()
        for heavy in {module.split(".")[0] for module in modules} & set(HOME_OF):
            at_home = any(where == home or where.startswith(home + "/") for home in HOME_OF[heavy])
            composition_root = path.name == "__main__.py" or where.startswith("launcher/")
            assert at_home or (composition_root and heavy != "ray"), f"{where}: {heavy}"


# Of our dependencies, those that every engine brings.
PROVIDED = {
    "msgspec",
    "numpy",
    "psutil",
    "safetensors",
    "torch",
    "transformers",
}


def test_inside_an_engine_only_what_it_brings_is_imported() -> None:
    """rl-async is installed there without its dependencies, and with those of ``installation.BESIDE_ENGINES``."""
    left = [ROOT / "rollout_server" / name for name in ("sglang/__main__.py", "vllm/__main__.py")]
    left += [ROOT / "rollout_server/vllm" / f"{name}.py" for name in ("int8", "old_servers", "plugin", "slices")]
    inside, foreign = set(left), set[str]()
    while left:
        path = left.pop()
        modules = imports(path, at_once="rollout_server" not in path.parts)
        foreign |= {module.split(".")[0] for module in modules} - {*sys.stdlib_module_names, "rl_async"}
        reached = our_files(modules) - inside
        inside |= reached
        left += reached
    assert ROOT / "weight_sync/receiver.py" in inside
    engines = {"vllm", "sglang", "starlette", "uvicorn"}
    assert foreign - engines == PROVIDED | set(installation.BESIDE_ENGINES)


ROLES = {  # every role's own process; vLLM's and SGLang's --help are theirs
    *("transfer_queue", "transfer_queue/shard", "trainer", "trainer/finetune", "rollout_server"),
    *("agent_loop", "agent_loop/gateway", "agent_loop/environments/player", "reward_loop/server", "launcher/cli"),
}
SLOW = {*HOME_OF, "transformers", "peft", "accelerate"}  # each takes seconds to import


@pytest.mark.parametrize("start", [*(f"{role}/__main__.py" for role in sorted(ROLES)), "launcher/runs/prepare.py"])
def test_help_imports_nothing_slow(start: str) -> None:
    """What is imported before arguments are parsed, the packages on the way included."""
    more = {"aiohttp", "pyarrow", "zmq"} if start.startswith("launcher/cli/") else set()  # users type that one
    slow = SLOW | more
    reached, left = {ROOT / start}, [ROOT / start]
    while left:
        path = left.pop()
        modules = imports(path, at_once=True)
        assert not {module.split(".")[0] for module in modules} & slow, f"--help of {start} imports {path}"
        files = our_files(modules)
        packages = {file.parent / "__init__.py" for file in files}
        new = (files | {file for file in packages if file.is_file()}) - reached
        reached |= new
        left += new


def test_every_role_is_known() -> None:
    theirs = {"rollout_server/vllm", "rollout_server/sglang"}
    assert {path.parent.relative_to(ROOT).as_posix() for path in FILES if path.name == "__main__.py"} == ROLES | theirs


def _node(path: Path) -> str:
    """Composition roots and a root folder's own files are nodes; any other file belongs to its folder."""
    where = path.relative_to(ROOT)
    alone = path.name in ("__main__.py", "__init__.py") or len(where.parts) == 2
    return where.as_posix() if alone else where.parent.as_posix()


MAKE = re.compile(
    r"(?<![A-Za-z])(cuda|npu|hccl|rccl)(?![A-Za-z])"  # a type of device of torch's, or collectives
    r"|(?<=[:._])nccl|[NHR]CCL|(CUDA|HIP|ROCR|ASCEND)_"  # alone it is the transport of weights, whatever the make
)
# Occur in every text in which MAKE finds anything.
LETTERS = re.compile("cuda|npu|[hnr]ccl|[NHR]CCL|CUDA|HIP|ROCR|ASCEND")


def _words(path: Path) -> set[str]:
    """Every name and text in a file's code; docstrings and comments may explain what they like.

    None of a file without the letters of a make, which need not be parsed.
    """
    text = path.read_text()
    if not LETTERS.search(text):
        return set()
    tree = ast.parse(text)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                found.add(text)
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
            case ast.ImportFrom(module=str(name)) if not name.startswith("rl_async."):
                found.add(name)
    return found


def test_one_module_names_makes_of_accelerators() -> None:
    """What else names one runs on that make only: Megatron-Core calls CUDA itself."""
    home, megatron = ROOT / "rl_async" / "accelerators.py", ROOT / "trainer" / "megatron"
    files = [*FILES, *(ROOT / "benchmarks").rglob("*.py")]
    found = {path: words for path in files if (words := {word for word in _words(path) if MAKE.search(word)})}
    assert {path for path in found if path != home and path.parent != megatron} == set(), found
    assert home in found


NAMING = """\
x = "cuda:0"
x = "cpu:gloo,cuda:nccl"
x = 'npu'
f("cpu:gloo,npu:hccl")
f(cuda=1)
f"{rank} on cuda:{index}"
x = "NCCL_SOCKET_IFNAME"
x = "ASCEND_RT_VISIBLE_DEVICES"
x.cuda()
x.is_cuda
torch.npu.synchronize()
dist.ProcessGroupHCCL
dist.is_nccl_available()
from torch import cuda
from torch.cuda import synchronize
""".splitlines()
HARMLESS = ['x = "nccl"', 'x = "transport=nccl"', "NcclSender()", '"""For cuda."""', "# cuda", 'x = "input"']


@pytest.mark.parametrize(("code", "named"), [*((code, True) for code in NAMING), *((code, False) for code in HARMLESS)])
def test_makes_are_noticed_but_not_the_transport_nor_what_explains(code: str, named: bool, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(code)
    assert any(MAKE.search(word) for word in _words(tmp_path / "file.py")) == named
