"""Files of SGLang's wheel, imported as they are: structs, its side of a weight update, and the server's routes.

``scripts/install sglang`` puts them into a folder. SGLang as a whole cannot be imported without CUDA, so that
its packages become empty ones and what these files merely mention is stubbed, each stub with its reason.
"""

import ast
import enum
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

FOLDER = "RL_ASYNC_SGLANG_CONTRACT"
DEFAULT = Path(__file__).parents[3] / ".sglang-contract"
PACKAGES = (
    *("sglang", "sglang.api", "sglang.api.v1", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.gemm"),
    *("sglang.srt", "sglang.srt.beam_search", "sglang.srt.configs", "sglang.srt.disaggregation", "sglang.srt.lora"),
    *("sglang.srt.managers", "sglang.srt.managers.scheduler_components", "sglang.srt.model_executor"),
    *("sglang.srt.model_executor.model_runner_components", "sglang.srt.model_loader", "sglang.srt.multimodal"),
    *("sglang.srt.sampling", "sglang.srt.utils", "sglang.srt.weight_sync"),
)


def wheel_folder() -> Path:
    """Where the files are; skips the test if they are nowhere."""
    folder = Path(os.environ.get(FOLDER, DEFAULT))
    if not (folder / "sglang").is_dir():
        pytest.skip(f"SGLang's request classes are not here; install them with scripts/install sglang, or set {FOLDER}")
    return folder


def load(folder: Path, name: str) -> Any:
    """The module ``name`` of the wheel in ``folder``."""
    if "sglang" not in sys.modules:
        _make_packages(folder)
        _stub_mentions()
        _stub_runtime(folder)
    assert sys.modules["sglang"].__path__ == [str(folder / "sglang")]
    return importlib.import_module(name)


def field_names(folder: Path) -> set[str]:
    """Every setting of SGLang's server; ``--a-b`` on its command line is ``a_b`` here. Read, not run."""
    found: set[str] = set()
    for file in sorted((folder / "sglang/srt/arg_groups/fields").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.keyword) and node.arg == "aliases":
                found |= {flag.removeprefix("--").replace("-", "_") for flag in ast.literal_eval(node.value)}
    return found


def _make_packages(folder: Path) -> None:
    for name in PACKAGES:
        module = ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]  # their own __init__ files import CUDA kernels
        sys.modules[name] = module


def _stub_mentions() -> None:
    """Types of requests with images, LoRA adapters and hidden states, which io_struct.py mentions and we never send."""
    _stub(
        "sglang.srt.managers.schedule_batch",
        Modality=enum.Enum("Modality", "IMAGE VIDEO AUDIO"),
        MultimodalProcessorOutput=Any,
        ReturnHiddenStatesMode=Any,
        SamplingLogprobsMode=Any,
        get_return_hidden_states_mode=lambda mode: mode,
    )
    _stub("sglang.srt.multimodal.mm_utils", has_valid_data=lambda data: data is not None)
    _stub("sglang.srt.lora.lora_registry", LoRARef=Any)
    _stub("sglang.srt.utils.cuda_ipc_transport_utils", CudaIpcTensorTransportProxy=Any)
    _stub("sglang.srt.disaggregation.utils", DisaggregationMode=enum.Enum("DisaggregationMode", "DECODE PREFILL NULL"))
    _stub("sglang.srt.utils.weight_checker", overall_checksum=str)


def _stub_runtime(folder: Path) -> None:
    """What SGLang's weight updater asks of the running engine: one worker, no cache of weights, nothing quantised."""
    _stub(
        "sglang.srt.runtime_context",
        get_serving=lambda: SimpleNamespace(tokenizer_worker_num=1),
        get_model=lambda: SimpleNamespace(weight_cache_mode="off"),
        get_parallel=lambda: SimpleNamespace(tp_rank=0, tp_group=SimpleNamespace(cpu_group=dist.group.WORLD)),
    )
    loader = SimpleNamespace(
        restore_weights_before_loading=lambda model, device: None, postprocess_weights=lambda model, device: None
    )
    _stub("sglang.srt.configs.load_config", LoadConfig=Any)
    _stub(
        "sglang.srt.model_loader.loader",
        DefaultModelLoader=loader,
        get_model_loader=None,
        post_load_weights=lambda model: None,
    )
    _stub("sglang.srt.model_loader.utils", set_default_torch_dtype=None)
    _stub("sglang.srt.model_loader.weight_utils", default_weight_loader=None, get_pp_stage_load_group=None)
    _stub("sglang.srt.platforms", current_platform=None)
    _stub("sglang.srt.utils.patch_torch", monkey_patch_torch_reductions=None)
    _stub("sglang.kernels.ops.gemm.bf16_fp32", hpc_bf16xfp32_gemm_enabled=lambda: False)
    utilities = sys.modules["sglang.srt.utils"]
    names = ("ImageData", "VideoData", "MultiprocessingSerializer", "dynamic_import", "get_available_gpu_memory")
    path = folder / "sglang/srt/utils/common.py"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split("."))
    joins = cut_out(path, "init_custom_process_group", torch_release=release)
    utilities.__dict__.update(dict.fromkeys(names, Any), init_custom_process_group=joins)


def cut_out(path: Path, name: str, **uses: Any) -> Any:
    """A function, a method, or the value of a name, of a file that cannot be imported. ``uses`` are its globals."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and name in [ast.unparse(target) for target in node.targets]:
            return ast.literal_eval(node.value)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
            exec(compile(ast.fix_missing_locations(ast.Module([future, node], [])), str(path), "exec"), uses)
            return uses[name]
    raise AssertionError(f"{path} has no {name}")


def _stub(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


@dataclass(frozen=True)
class Route:
    """``body`` is the name of a struct of io_struct.py; empty: the route reads none."""

    methods: frozenset[str]
    body: str


def routes(folder: Path) -> dict[str, Route]:
    """Of every path; for one that two functions serve, the first, as in the server."""
    found: dict[str, Route] = {}
    files = [folder / "sglang/srt/entrypoints" / name for name in ("http_server.py", "v1_loads.py")]
    for node in [node for file in files for node in ast.parse(file.read_text()).body]:
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and (methods := _methods(decorator)):
                path = decorator.args[0]
                if isinstance(path, ast.Constant):
                    found.setdefault(path.value, Route(methods, _body(node)))
    return found


def refusal(folder: Path, route: Route, path: str, body: Any) -> str:
    """Why SGLang would answer 400 to this body, or which key it would overlook; empty: neither."""
    try:
        if route.body:
            struct = getattr(load(folder, "sglang.srt.managers.io_struct"), route.body)
            TypeAdapter(struct).validate_python(body)
            if unknown := set(body) - set(struct.__annotations__) - {"rid"}:  # rid: of the base class
                return f"SGLang would overlook {', '.join(unknown)}"
        if path == "/generate":
            load(folder, "sglang.api.v1.api_types").GenerateRequest.from_json_value(body)
            sampling = load(folder, "sglang.srt.sampling.sampling_params").SamplingParams(**body["sampling_params"])
            sampling.normalize(None)
            sampling.verify(vocab_size=100)
    except ValueError as error:  # pydantic's and JsonContractError are
        return f"{type(error).__name__}: {error}"
    return ""


def _methods(decorator: ast.Call) -> frozenset[str]:
    name = decorator.func.attr if isinstance(decorator.func, ast.Attribute) else ""
    if name in ("get", "post"):
        return frozenset({name.upper()})
    if name == "api_route":
        [methods] = [word.value for word in decorator.keywords if word.arg == "methods"]
        return frozenset(ast.literal_eval(methods))
    return frozenset()


def _body(function: ast.AsyncFunctionDef | ast.FunctionDef) -> str:
    """The struct in ``obj: Struct`` or ``obj: Annotated[Struct, Body()]``, perhaps optional."""
    for argument in function.args.args:
        if argument.arg == "obj" and argument.annotation is not None:
            names = [node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)]
            [struct] = [name for name in names if name not in ("Annotated", "Optional", "Body")]
            return struct
    return ""
