"""LoRA adapters inside vLLM (``--enable-lora``): every request samples with the adapters that were published last.

vLLM asks its worker's manager to load the adapter that a request names, usually from a folder. With our patches every
request names the same one, and the manager takes it from memory, where ``WeightTransfer`` (``slices.py``) put it.
Before the first publication it is empty, so requests sample from the base.
"""

from typing import Any

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets import Pairs

# vLLM's number for the only adapter of an engine.
NUMBER, NAME = 1, "published"
PEFTS = "base_model.model."


def register() -> None:
    """Patch vLLM: requests name our adapter, and workers make it of the published tensors."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.engine.core import EngineCore

    begin, load = EngineCore.preprocess_add_request, WorkerLoRAManager._load_adapter

    def with_adapter(core: Any, request: Any) -> Any:
        if core.vllm_config.lora_config is not None:
            # Before prompts are hashed for the prefix cache, since the hash covers the adapter's name.
            request.lora_request = LoRARequest(NAME, NUMBER, NAME)
        return begin(core, request)

    def from_memory(workers: Any, request: Any) -> Any:
        manager = workers._adapter_manager
        return _made(manager) if request.lora_name == NAME else load(workers, request)

    EngineCore.preprocess_add_request = with_adapter
    WorkerLoRAManager._load_adapter = from_memory


def publish(manager: Any, pairs: Pairs, scale: float) -> None:
    """Have the model's adapter ``manager`` use these adapters from the next request on.

    Raises WeightSyncError if vLLM would silently leave one out, or has room for a lower rank only.
    """
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = mapper and mapper.get_rename_mapper()
    named = {}
    for layer, (low, high) in pairs.items():
        name, _ = parse_fine_tuned_lora_name(f"{PEFTS}{layer}.lora_A.weight", mapper)
        # Copies, since the next update may arrive in the same memory while requests are sampled.
        named[name] = low.clone(), high * scale
    # Layers on another pipeline stage have no modules here, but the same last names.
    fused = [name for names in manager.packed_modules.values() for name in names]
    takes = {name.rpartition(".")[2] for name in (*manager.modules, *fused)}
    if left := sorted({kind for name in named if (kind := name.rpartition(".")[2]) not in takes}):
        raise WeightSyncError(
            f"vLLM takes no adapters of {', '.join(left)} in this model; leave them out of lora.targets"
        )
    most = manager.lora_config.max_lora_rank
    if any(len(low) > most for low, _ in named.values()):
        raise WeightSyncError(f"this engine was started for adapters of rank {most} at most (--max-lora-rank)")
    manager.rl_async_published = named
    # The next request loads them.
    manager.remove_all_adapters()


def _made(manager: Any) -> Any:
    """Make vLLM's adapter of the published tensors."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    dtype, named = manager.lora_config.lora_dtype, getattr(manager, "rl_async_published", {})
    layers = {
        # The scale is in B.
        name: LoRALayerWeights(
            name, rank=len(low), lora_alpha=len(low), lora_a=low.to(dtype), lora_b=high.to(dtype), scaling=1.0
        )
        for name, (low, high) in named.items()
    }
    return LoRAModel(NUMBER, manager.lora_config.max_lora_rank, layers)
