"""Adapters on disk: PEFT's own files, what they belong to, and the model that both make together.

adapter/adapter_config.json, adapter_model.safetensors    as PEFT and vLLM read them
adapter/base.json                                         the base's folder, and the digest of each weight file
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rl_async.configs.schema.trainer import LoraConfig
from rl_async.errors import CheckpointDamaged, UserError
from rl_async.trainer.checkpoints.manifest import FileDigest, digest
from rl_async.trainer.checkpoints.shards import write_tensors, write_whole
from rl_async.trainer.model.lora import NAMES
from rl_async.weight_sync.buckets.adapters import add

ADAPTER_FOLDER = "adapter"
CONFIG, TENSORS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
OURS, PEFTS = "lm.", "base_model.model."  # before the names of the model's modules
WEIGHT = ".weight"


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What adapters belong to: the folder of a model, and the digest of each of its weight files."""

    path: str
    files: dict[str, FileDigest]


def base_of(path: str) -> Base:
    """Read and sum up the weight files of ``path``. Raises UserError if there are none."""
    files = {file.name: digest(file) for file in sorted(Path(path).glob("*.safetensors"))}
    if not files:
        raise UserError(f"trainer.lora: {path} has no *.safetensors, which merging adapters reads; save it as such")
    return Base(str(Path(path).absolute()), files)


def write_adapter(folder: Path, shards: Path, base: Base, config: LoraConfig, targets: list[str]) -> None:
    """Put the adapters of ``shards`` together in ``folder``'s adapter folder. No collective."""
    target = folder / ADAPTER_FOLDER
    target.mkdir(exist_ok=True)
    write_whole(shards, target / TENSORS, _peft_name)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "lora_dropout": 0.0,
        "bias": "none",
    } | _kind(config, targets)
    (target / CONFIG).write_text(json.dumps(described, indent=2))
    (target / BASE).write_bytes(msgspec.json.encode(base))


def require_whole(folder: Path) -> None:
    """Raise UserError if the checkpoint ``folder`` has adapters."""
    if (folder / ADAPTER_FOLDER).is_dir():
        raise UserError(f"{folder} has adapters alone; set trainer.lora as it was, or start from `rl-async export`")


def require_adapters(folder: Path, base: Base, config: LoraConfig, targets: list[str]) -> None:
    """Raise UserError unless the checkpoint ``folder`` has adapters of this kind and this base."""
    file = folder / ADAPTER_FOLDER / BASE
    if not file.is_file():
        raise UserError(f"{folder} has whole weights and no adapters; leave trainer.lora out, or start anew from it")
    if read_base(file).files != base.files:
        raise UserError(
            f"{folder}: its adapters were trained on {read_base(file).path}, and {base.path} has other weights; set "
            "model.path to what it was"
        )
    described = json.loads((folder / ADAPTER_FOLDER / CONFIG).read_text())
    changed = [key for key, value in _kind(config, targets).items() if described[key] != value]
    if changed:
        raise UserError(f"{folder}: its adapters have another {', '.join(changed)}; set trainer.lora to what it was")


def read_base(file: Path) -> Base:
    """Raises CheckpointDamaged for a file that is not one of ours."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Base)
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(f"{file}: {error}") from error


def write_merged(adapter: Path, target: Path) -> None:
    """Write the base's tensors under their names and in their dtype, adapters added, one at a time.

    Raises UserError if the base is no longer what the adapters were trained on.
    """
    base = read_base(adapter / BASE)
    if base_of(base.path).files != base.files:
        raise UserError(f"{base.path} has other weights now than those that the adapters in {adapter} were trained on")
    described = json.loads((adapter / CONFIG).read_text())
    scale = LoraConfig(rank=described["r"], alpha=described["lora_alpha"]).scale
    parts = load_file(adapter / TENSORS)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(Path(base.path) / name, framework="pt")) for name in base.files]
        where = {name: file for file in files for name in list(file.keys())}
        sizes = {}
        for name, file in where.items():
            piece = file.get_slice(name)
            sizes[name] = (piece.get_dtype(), piece.get_shape())
        unknown = [n for key in parts if (n := _module(key) + WEIGHT) not in where]
        if unknown:
            raise UserError(f"{base.path} has no tensor {unknown[0]}, which an adapter in {adapter} changes")

        def tensors() -> Iterator[Tensor]:
            for name, file in where.items():
                key = PEFTS + name.removesuffix(WEIGHT)
                weight = file.get_tensor(name)
                low, high = (parts.get(key + ending) for ending in (".lora_A.weight", ".lora_B.weight"))
                yield weight if low is None or high is None else add(weight, low, high, scale)

        write_tensors(target, sizes, tensors())


def _kind(config: LoraConfig, targets: list[str]) -> dict[str, object]:
    """What two adapters must have in common, under PEFT's names."""
    return {"r": config.rank, "lora_alpha": config.alpha, "target_modules": targets}


def _module(key: str) -> str:
    """The layer that a tensor of PEFT's file is for."""
    return key.removeprefix(PEFTS).rpartition(".lora_")[0]


def _peft_name(name: str) -> str | None:
    """The name in PEFT's file of a tensor in our shards; None for one that is no adapter's."""
    if not name.endswith(NAMES):
        return None
    return PEFTS + name.removeprefix(OURS).replace(".default.weight", ".weight")
