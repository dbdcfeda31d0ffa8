"""Files of SGLang's wheel, imported as they are: its request and response structs, and its side of a weight update.

``scripts/install sglang`` puts them into a folder. SGLang as a whole cannot be imported without CUDA, so that
its packages become empty ones and what these files merely mention is stubbed, each stub with its reason.
"""

import ast
import enum
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
    utilities.__dict__.update(
        dict.fromkeys(names, Any), init_custom_process_group=_cut_out(path, "init_custom_process_group")
    )


def _cut_out(path: Path, name: str) -> Any:
    """One function of a file that cannot be imported, as it stands there."""
    tree = ast.parse(path.read_text())
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split("."))
    names: dict[str, Any] = {"torch_release": release}  # the only global that it uses
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    return names[name]


def _stub(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
