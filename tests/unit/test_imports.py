"""Imports point one way between packages and inside them, and heavy packages stay where they belong."""

import ast
import functools
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from rl_async import installation
from rl_async.configs.importing.translation import read_settings
from rl_async.errors import ConfigError, UserError
from rl_async.insight.live_figures import conversation_of
from rl_async.insight.recorded_evaluations import side_by_side
from rl_async.insight.tail import last_record
from rl_async.insight.view.trajectories import row_at
from rl_async.launcher.plan.memory import read_shape
from rl_async.model_files import read_object
from rl_async.process.run_files import read_beats, read_budget, read_progress, read_request
from rl_async.recording import trained_file
from rl_async.trainer.checkpoints import read_state
from rl_async.trainer.finetune.loop import keep_lines
from rl_async.trainer.records import is_evaluated
from rl_async.transfer_queue.chat_messages import read_schemas
from tests.support.configs import float32_config

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
    left += [ROOT / "rollout_server/vllm" / f"{name}.py" for name in ("int8", "plugin", "slices", "versions")]
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
    *("transfer_queue", "trainer", "trainer/finetune", "rollout_server", "reward_loop/server", "launcher/cli"),
    *("agent_loop", "agent_loop/gateway", "agent_loop/environments/player"),
}
STARTS = [*(f"{role}/__main__.py" for role in sorted(ROLES)), "launcher/runs/prepare.py", "transfer_queue/shard.py"]
SLOW = {*HOME_OF, "transformers", "peft", "accelerate"}  # each takes seconds to import


@pytest.mark.parametrize("start", STARTS)
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


# Bytes from outside a process are decoded under a guard, and end in the module's own error, which names the file.


DECODES_ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"tests", "benchmarks", "examples", "docs", "scripts"}
DECODERS = ("json.loads", "json.load", "json.decode", "msgpack.decode", "yaml.decode", "toml.decode", "tomllib.loads")
DECODER = re.compile(r"\.(loads?|decode)\b")

PEER = "another process of the run, which sends what this version encodes"
CALLER = "the caller holds the guard"
CHECKED = "decoded once before, when it was checked"
# Functions that decode without a guard of their own: where the bytes come from, or who holds the guard.
WITHOUT = {
    ("rl_async/installation.py", "_source"): "metadata of the installed distribution",
    ("rl_async/recording.py", "read_trajectories"): CALLER,
    ("rl_async/files.py", "lost_when_read"): CHECKED,
    ("reward_loop/scorers/code_tests.py", "_decoded_value"): CALLER,
    ("rl_async/template_tokens.py", "_unprefixed"): "the tokenizer's library prints it",
    ("configs/engines.py", "with_float32_logits"): "what the same file declares; the user's part is guarded",
    ("launcher/plan/trials.py", "main"): PEER,
    ("launcher/runs/rehearsal.py", "main"): PEER,
    ("launcher/runs/rehearsal.py", "rehearse"): PEER,
    ("launcher/handle.py", "_named"): "what the same line has encoded",
    (
        "trainer/finetune/__init__.py",
        "map",
    ): "written by the launcher beside the arrays",
    ("transfer_queue/store.py", "decode_snapshot"): CALLER,
    ("transfer_queue/chat_messages.py", "_with_mapping"): CHECKED,
    ("transfer_queue/store.py", "recover"): CALLER,
    ("rollout_server/embedded/server.py", "generate"): CALLER,
    ("rollout_server/embedded/server.py", "abort"): CALLER,
    ("rollout_server/embedded/server.py", "init_transfer"): CALLER,
    ("rollout_server/embedded/server.py", "update"): CALLER,
    ("rollout_server/embedded/server.py", "finish_update"): CALLER,
    ("rollout_server/embedded/server.py", "weight_checker"): CALLER,
    ("rollout_server/json_schemas.py", "_one_line"): CALLER,
    ("rollout_server/vllm/slices.py", "weight_boxes"): PEER,
    ("reward_loop/scorers/code_driver.py", "main"): PEER,
    ("reward_loop/scorers/code_driver.py", "main_apart"): PEER,
    ("reward_loop/scorers/code_driver.py", "serve"): PEER,
    (
        "reward_loop/scorers/scorer_registry.py",
        "_open_dataset",
    ): "a config key that has been checked",
    ("reward_loop/server/app.py", "_read"): CALLER,
    ("agent_loop/chat_formats/render.py", "_within"): CHECKED,
    ("agent_loop/chat_formats/render.py", "nested"): CHECKED,
    ("launcher/runs/evaluate.py", "_last_said"): "the endpoint's client encodes it",
    ("agent_loop/environments/harbor.py", "_numbers"): CALLER,
    ("agent_loop/tools/mcp_connection.py", "_asked"): "the SDK encodes it in this process",
    ("agent_loop/tools/mcp_connection.py", "_answered"): "the SDK encodes it in this process",
    ("agent_loop/environments/host_process.py", "serve"): PEER,
    ("agent_loop/environments/player/verifiers.py", "main"): PEER,
    ("agent_loop/environments/adapters.py", "_load"): CHECKED,
    ("agent_loop/gateway/anthropic.py", "blocks"): CHECKED,
    ("sandbox/inside.py", "serve"): PEER,
    ("insight/tail.py", "record_of"): CALLER,
    ("insight/view/index.py", "_index"): CALLER,
}
GUARDS = ("UNDECODABLE", "DAMAGE", "undamaged", "RecursionError")


def _decodes(node: ast.AST, function: str = "", guards: str = "") -> Iterator[tuple[str, int, str]]:
    """Yield function, line and guards of each decode below a node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, guards = node.name, ""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).endswith(DECODERS)
    ):
        yield function, node.lineno, guards
    inside = guards
    if isinstance(node, ast.Try):
        inside += "".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
    if isinstance(node, ast.With | ast.AsyncWith):
        inside += "".join(ast.unparse(item) for item in node.items)
    body = getattr(node, "body", [])
    for child in ast.iter_child_nodes(node):
        yield from _decodes(child, function, inside if isinstance(body, list) and child in body else guards)


def test_decodes_of_bytes_from_outside_are_guarded() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=DECODES_ROOT, capture_output=True, text=True, check=True)
    files = [name for name in tracked.stdout.splitlines() if name.split("/")[0] not in OTHERS]
    texts = {name: (DECODES_ROOT / name).read_text() for name in files}
    found = {name: list(_decodes(ast.parse(text))) for name, text in texts.items() if DECODER.search(text)}
    bare = {
        (name, function): line
        for name, decodes in found.items()
        for function, line, guards in decodes
        if not any(guard in guards for guard in GUARDS)
    }

    assert sum(map(len, found.values())) > len(WITHOUT)
    assert bare.keys() - WITHOUT.keys() == set(), "guard them, or say in WITHOUT where their bytes come from"
    assert WITHOUT.keys() - bare.keys() == set(), "these are guarded, or gone"


CONTENTS = {
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "half a pair": b'"\\ud800"',
    "not UTF-8": b'"\xff"',
    "long": b"1" * 5000,
    "negative": b"-" + b"1" * 5000,
    "NaN": b"NaN",
    "cut": b'{"a": 1',
    "list": b"[]",
    "nothing": b"",
}


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "profile request": ("profiles/request.json", read_request),
    "schemas": ("tools.json", read_schemas),
    "budget": ("memory.json", read_budget),
    "heartbeat": ("ranks/0.json", read_beats),
    "progress": ("progress/engine-0.json", lambda run: read_progress(run, "engine-0")),
    "evaluated": ("evaluations.jsonl", lambda run: is_evaluated(run, 3)),
    "lines of a finetune run": ("metrics.jsonl", lambda run: keep_lines(run / "metrics.jsonl", "step", 3)),
    "last record": ("metrics.jsonl", lambda run: last_record(run / "metrics.jsonl")),
    "checkpoint": ("state.json", read_state),
    "object": ("config.json", lambda run: read_object(run / "config.json", "model.path")),
    "shape": ("config.json", lambda run: read_shape("model.path", run)),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_damaged_files_of_a_run_are_named(
    reader: tuple[str, Callable[[Path], Any]], content: bytes, tmp_path: Path
) -> None:
    name, read = reader
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content if not name.endswith("l") else content + b"\n")
    # JSON Lines files may have an empty line at the end.
    if name == "metrics.jsonl" and not content:
        return

    with pytest.raises(UserError) as caught:
        read(tmp_path)

    assert str(file) in str(caught.value)


ROWS: dict[str, Callable[[Path, Path], Any]] = {
    "row of the view": lambda run, file: row_at(file, 0),
    "conversation of the view": lambda run, file: conversation_of(run, {"step": 1, "lineage": 0}, 1),
    "evaluations side by side": lambda run, file: side_by_side(file, file, "a", "b"),
}


@pytest.mark.parametrize("content", [content for content in CONTENTS.values() if content], ids=list(CONTENTS)[:-1])
@pytest.mark.parametrize("read", ROWS.values(), ids=ROWS)
def test_damaged_rows_are_named(read: Callable[[Path, Path], Any], content: bytes, tmp_path: Path) -> None:
    file = trained_file(tmp_path, 1, 0, 0)
    file.parent.mkdir()
    for written in (gzip.compress(content + b"\n"), content):
        file.write_bytes(written)

        with pytest.raises(UserError) as caught:
            read(tmp_path, file)

        assert str(file) in str(caught.value)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "true", '"64"', "1.5", "[]", "1" * 400, '"\\ud800"'])
@pytest.mark.parametrize("name", ["hidden_size", "max_position_embeddings"])
def test_sizes_of_a_model_are_whole_numbers(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in (f'{{"{name}": {value}}}', f'{{"text_config": {{"{name}": {value}}}}}'):
        file.write_text(text)

        with pytest.raises(UserError, match=name) as caught:
            read_shape("model.path", tmp_path)

        assert "model.path" in str(caught.value) and str(file) in str(caught.value)


def test_other_values_of_a_model_may_be_infinite(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "head_dim": null, "time_step_limit": [0.0, Infinity]}')

    assert read_shape("model.path", tmp_path) is not None


def test_a_number_of_thousands_of_digits_in_foreign_settings_is_named(tmp_path: Path) -> None:
    for name, text in (("a.toml", f"a = {'1' * 5000}"), ("a.yaml", f"a: {'1' * 5000}"), ("a.json", "[" * 100_000)):
        file = tmp_path / name
        file.write_text(text)

        with pytest.raises(ConfigError) as caught:
            read_settings(file)

        assert str(file) in str(caught.value)


# The code of a model's repository is never run, nor is the user asked for permission to run it.

PACKAGES = ("agent_loop", "insight", "launcher", "reward_loop", "rollout_server", "trainer")


def describe(folder: Path) -> Any:
    from rl_async.launcher.model_info import describe

    return describe(folder, float32_config(None, [f"model.path={folder}", "data.path=none"]))


def train(folder: Path) -> Any:
    from rl_async.trainer.model import build_headed

    return build_headed(str(folder), "policy")


def serve(folder: Path) -> Any:
    from rl_async.rollout_server.embedded.server import load_model

    return load_model(float32_config(None, [f"model.path={folder}", "data.path=none", "model.device=cpu"]))


@pytest.mark.parametrize("load", [describe, train, serve])
def test_a_model_that_needs_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], Any]
) -> None:
    asked: list[str] = []

    def answer(prompt: str = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    code = {"AutoConfig": "conf.Conf", "AutoModelForCausalLM": "conf.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (tmp_path / "conf.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError):
        load(tmp_path)
    assert asked == [] and not (tmp_path / "ran").exists()


def test_every_auto_class_is_told_to_run_no_code() -> None:
    found = [
        (file, call)
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if "from_" in (text := file.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("from_pretrained", "from_config"))
    ]
    autos = [(file, call) for file, call in found if ast.unparse(call.func).startswith(("Auto", "kind."))]
    silent = [f"{file}:{call.lineno}" for file, call in autos if "trust_remote_code=False" not in ast.unparse(call)]
    assert len(autos) >= 10 and silent == []
