"""What the files of a Hugging Face model say without torch: headers of safetensors files, and the number of experts.

A header is 8 bytes with its length, then JSON with the type, shape and place of each tensor. Headers and the index
that names such files are checked, since they may come from strangers.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
from safetensors import SafetensorError, safe_open

from rl_async.errors import UserError
from rl_async.files import UNDECODABLE

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A file is read for its digest in blocks of this size.
BLOCK_BYTES = 2**22


class StoredTensor(NamedTuple):
    """The entry of a tensor in a header; ``dtype`` is the format's name of it, such as BF16."""

    dtype: str
    shape: list[int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_object(file: Path, key: str = "") -> dict[str, Any]:
    """Return the JSON object that a file such as ``config.json`` holds.

    Raises UserError, naming the config's ``key`` and the file, for a file that holds anything else.
    """
    place = f"{key}: {file}" if key else f"{file}"
    try:
        # Models publish limits as Infinity, which msgspec does not read.
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{place} must hold a JSON object")
    return found


def refuse_quantized(quantization: Any, key: str, folder: Path) -> None:
    """Raise UserError, naming ``key``, unless weights with this ``quantization_config`` of config.json can train."""
    if quantization and quantization.get("quant_method") != "mxfp4":
        raise UserError(
            f"{key}: {folder} is quantized (quantization_config of its config.json), which cannot be trained, nor be "
            "the base of adapters (QLoRA); use the same model in bfloat16 or float32"
        )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Raises ValueError, naming the file, unless it is a safetensors file.

    The format's own library reads the header: tensors that overlap, leave holes, or whose bytes are not those of their
    type and shape are errors.
    """
    try:
        with safe_open(file, "numpy") as stored:
            slices = [(name, stored.get_slice(name)) for name in stored.offset_keys()]
            return {name: StoredTensor(part.get_dtype(), part.get_shape()) for name, part in slices}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from error


def indexed_files(index: Path) -> list[str]:
    """Return the files that an index names, each in the index's folder.

    Raises ValueError, naming the index, if it is none, or names something elsewhere.
    """
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except UNDECODABLE as error:
        raise ValueError(f"cannot read {index}: {error}") from error
    for name in names:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{index} names {name!r}, which is not a file of its folder")
    return sorted(names)


# Models for images and text whose text part, a causal language model of its own, is all that is trained of them.
TEXT_ALONE = ("qwen3_5", "qwen3_5_moe")
# Transformers' classes of the modules that carry a state from token to token (state-space layers, linear attention,
# convolutions), by model type. They are called as ``module(hidden, cache=..., attention_mask=...)``.
MIXERS = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
}


def mixers_of(model: Any) -> list[Any]:
    """List the modules of a Hugging Face model that carry a state from token to token."""
    kind = MIXERS.get(model.config.model_type)
    return [module for module in model.modules() if type(module).__name__ == kind]


class FileDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a file in bytes and its xxh3-128 in hex."""

    bytes: int
    xxh3: str


def digest(path: Path) -> FileDigest:
    """Return size and checksum of a file, read in blocks."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            state.update(block)
            size += len(block)
    return FileDigest(size, state.hexdigest())


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's weights as Transformers finds them: one, or those of an index.

    Raises ValueError if there are none.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if not (folder / INDEX).is_file():
        raise ValueError(f"no {ONE_FILE} or {INDEX} in {folder}; save the model in the safetensors format")
    return [folder / name for name in indexed_files(folder / INDEX)]


def weights_name(folder: Path) -> str:
    """Return a name for the weights in a model's folder, made of the digests of their files, which it reads.

    Raises ValueError if there are none, and OSError if a file cannot be read.
    """
    digests = [digest(file) for file in weight_files(folder)]
    return f"files-{xxhash.xxh3_128_hexdigest(msgspec.json.encode(digests))}"


def experts_of(config: Any) -> int:
    """Return the number of experts in a layer of a model with this Hugging Face config; 0 for a dense one."""
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)
