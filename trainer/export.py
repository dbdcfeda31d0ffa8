"""Writes what other tools read: a checkpoint as Hugging Face safetensors, and adapters in PEFT's format.

adapter/adapter_config.json, adapter_model.safetensors    as PEFT and vLLM read them
adapter/base.json                                         the base's folder and the digest of each of its weight files
"""

import glob
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from rl_async.configs.schema.trainer import LoraConfig
from rl_async.errors import CheckpointDamaged, UserError
from rl_async.files import GENERATION_CONFIG, UNDECODABLE, written_whole
from rl_async.model_files import FileDigest, digest, read_object
from rl_async.trainer.checkpoints import MOMENT, StoredShards, damage_of, list_checkpoints, write_tensors, write_whole
from rl_async.trainer.lora import NAMES
from rl_async.trainer.model import MODEL_FOLDER, VALUE_HEAD, VALUE_HEAD_FILE
from rl_async.trainer.pretrained import StoredWeights
from rl_async.weight_sync.buckets import add

SHARDS = "shards"
# The prefix of the language model's parameters.
WEIGHTS = "lm."
WHOLE = "model.safetensors"


def write_described(folder: Path, config: Any, tokenizer: str | None, complete: bool) -> None:
    """Write what other tools read beside the shards of ``folder``: a Hugging Face folder, and a value head if there is
    one.

    ``config`` is the model's; ``tokenizer`` is the folder of the tokenizer, the processors and the generation config to
    copy, None for a model without logits.
    Unless ``complete`` the folder has no weights. Not a collective. Raises UserError as ``write_model`` does.
    """
    target = folder / MODEL_FOLDER
    config.save_pretrained(target)
    if tokenizer is not None:
        copy_text_files(Path(tokenizer), target)
    if complete:
        write_model(folder)
    shards = StoredShards(folder / SHARDS)
    names = [name for name in shards.sizes if name.startswith(VALUE_HEAD) and MOMENT not in name]
    # They stay out of the model's folder, since engines load every tensor in it.
    if names:
        save_file({name.removeprefix(VALUE_HEAD): shards.whole(name) for name in names}, folder / VALUE_HEAD_FILE)


# The processors of a vision-language model, and a template that older ones keep apart from the tokenizer's.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def copy_text_files(source: Path, target: Path) -> None:
    """Copy what a model needs to read and write: its tokenizer, the processors of its images, and its generation
    config, which may name more tokens that end a turn than the tokenizer does."""
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(target)
    for name in (GENERATION_CONFIG, *PROCESSOR_FILES):
        if (source / name).is_file():
            shutil.copy(source / name, target)


def write_model(folder: Path, target: Path | None = None) -> None:
    """Write the language model's weights to ``target``, by default beside the config in ``folder``'s Hugging Face
    folder.

    Adapters are merged into their base. Not a collective. Raises UserError if the base's weights have changed.
    """
    target = target or folder / MODEL_FOLDER / WHOLE
    if (folder / ADAPTER_FOLDER).is_dir():
        write_merged(folder / ADAPTER_FOLDER, target)
    else:
        file = folder / MODEL_FOLDER / "config.json"
        kind = read_object(file).get("model_type")
        if not isinstance(kind, str):
            raise UserError(f"{file}: model_type must be a text, not {kind!r:.80}")

        def hugging_face_name(name: str) -> str | None:
            return name.removeprefix(WEIGHTS) if name.startswith(WEIGHTS) and MOMENT not in name else None

        write_whole(folder / SHARDS, target, hugging_face_name, kind)


def export(run: Path, out: Path, step: int | None = None, part: str = ".", *, merge: bool = True) -> int:
    """Write the Hugging Face folder ``out`` from the checkpoint of ``step``, by default the newest; return the step.

    ``part`` is the model's folder within the checkpoint: ``.`` for the policy, ``critic`` for a critic with a model of
    its own, whose value head is copied too. Adapters are merged into their base unless ``merge`` is False: ``out`` is
    then PEFT's folder of the adapters. Raises UserError if the checkpoint is missing or damaged or has no adapters, or
    ``out`` exists.
    """
    if not run.is_dir():
        raise UserError(f"no run folder {run}")
    found = {int(path.name.rpartition("-")[2]): path for path in list_checkpoints(run / "checkpoints")}
    chosen = max(found, default=None) if step is None else step
    if chosen is None or chosen not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise UserError(f"{run} has no checkpoint{'' if step is None else f' of step {step}'}; there are: {there}")
    folder = found[chosen]
    if wrong := damage_of(folder):
        raise UserError(f"checkpoint {folder} is damaged: {wrong}; choose another with --step")
    if not (folder / part / MODEL_FOLDER).is_dir():
        raise UserError(f"checkpoint {folder} has no model in {part}")
    if not merge and not (folder / part / ADAPTER_FOLDER).is_dir():
        raise UserError(f"checkpoint {folder} has whole weights and no adapters; leave out --adapter")
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not exist yet")
    for left in out.parent.glob(f".{glob.escape(out.name)}.[0-9]*"):
        # These are whole weights, left by an export that was killed.
        shutil.rmtree(left)
    with written_whole(out) as temporary:
        if not merge:
            shutil.copytree(folder / part / ADAPTER_FOLDER, temporary)
            return chosen
        shutil.copytree(folder / part / MODEL_FOLDER, temporary)
        if not (temporary / WHOLE).is_file():
            write_model(folder / part, temporary / WHOLE)
        if part != "." and (folder / part / VALUE_HEAD_FILE).is_file():
            shutil.copy(folder / part / VALUE_HEAD_FILE, temporary)
    return chosen


ADAPTER_FOLDER = "adapter"
CONFIG, TENSORS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
# The prefix of the model's modules here, and in a file that PEFT reads.
OURS, PEFTS = "lm.", "base_model.model."
WEIGHT = ".weight"


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of adapters: a model's folder, and the digest of each of its weight files.

    ``renamed`` has the names in these files, by the model's, of tensors whose names differ.
    """

    path: str
    files: dict[str, FileDigest]
    renamed: dict[str, str] = {}


def base_of(path: str, renamed: Mapping[str, str] = {}) -> Base:
    """Describe the model in ``path``, reading its weight files. Raises UserError without any."""
    stored = StoredWeights(Path(path), "trainer.lora")
    return Base(str(Path(path).absolute()), {file.name: digest(file) for file in stored.files}, dict(renamed))


def write_adapter(folder: Path, shards: Path, base: Base, config: LoraConfig, targets: list[str]) -> None:
    """Assemble the adapters of ``shards`` in ``folder``'s adapter folder, in PEFT's format. Not a collective."""
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
    """Raise UserError if the checkpoint ``folder`` holds adapters instead of whole weights."""
    if (folder / ADAPTER_FOLDER).is_dir():
        raise UserError(
            f"{folder} holds only adapters; set trainer.lora as in that run, or start from `rl-async export`'s model"
        )


def require_adapters(folder: Path, base: Base, config: LoraConfig, targets: list[str]) -> None:
    """Raise UserError unless the checkpoint ``folder`` holds adapters of this kind for this base."""
    file = folder / ADAPTER_FOLDER / BASE
    if not file.is_file():
        raise UserError(f"{folder} holds whole weights, not adapters; omit trainer.lora, or start a new run from it")
    if read_base(file).files != base.files:
        raise UserError(
            f"{folder}: its adapters were trained on {read_base(file).path}, but {base.path} has other weights; set "
            "model.path as in that run"
        )
    described = read_object(folder / ADAPTER_FOLDER / CONFIG)
    # Older checkpoints do not say that they are not stabilised.
    changed = [key for key, value in _kind(config, targets).items() if described.get(key, False) != value]
    if changed:
        raise UserError(f"{folder}: its adapters differ in {', '.join(changed)}; set trainer.lora as in that run")


def read_base(file: Path) -> Base:
    """Read ``base.json``. Raises CheckpointDamaged if it is malformed."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Base)
    except UNDECODABLE as error:
        raise CheckpointDamaged(f"{file}: {error}") from error


def write_merged(adapter: Path, target: Path) -> None:
    """Write the base's tensors with adapters added, under their names and in their dtype, one at a time.

    Raises UserError if the base's weights have changed since the adapters were trained.
    """
    base = read_base(adapter / BASE)
    if base_of(base.path).files != base.files:
        raise UserError(f"{base.path} no longer has the weights on which the adapters in {adapter} were trained")
    described = read_object(adapter / CONFIG)
    try:
        shape = {
            "rank": described.get("r"),
            "alpha": described.get("lora_alpha"),
            "rank_stabilized": described.get("use_rslora", False),
        }
        scale = msgspec.convert(shape, LoraConfig).scale
    except msgspec.ValidationError as error:
        raise CheckpointDamaged(f"{adapter / CONFIG}: r, lora_alpha or use_rslora: {error}") from error
    found = load_file(adapter / TENSORS)
    parts = {_stored(key, base): part for key, part in found.items()}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(Path(base.path) / name, framework="pt")) for name in base.files]
        where = {name: file for file in files for name in list(file.keys())}
        sizes = {}
        for name, file in where.items():
            piece = file.get_slice(name)
            sizes[name] = (piece.get_dtype(), piece.get_shape())
        unknown = [n for n, _ in parts if n not in where]
        if unknown:
            raise UserError(f"{base.path} has no tensor {unknown[0]}, for which {adapter} has an adapter")

        def tensors() -> Iterator[Tensor]:
            for name, file in where.items():
                weight = file.get_tensor(name)
                low, high = (parts.get((name, side)) for side in ("A.weight", "B.weight"))
                yield weight if low is None or high is None else add(weight, low, high, scale)

        write_tensors(target, sizes, tensors())


def _kind(config: LoraConfig, targets: list[str]) -> dict[str, object]:
    """Return the settings that two sets of adapters must share to continue one another, under PEFT's names."""
    return {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rank_stabilized,
        "target_modules": targets,
    }


def _stored(key: str, base: Base) -> tuple[str, str]:
    """Return the base's tensor that a tensor of PEFT's file belongs to, and its own place: A.weight or B.weight."""
    layer, _, side = key.removeprefix(PEFTS).rpartition(".lora_")
    name = layer + WEIGHT
    return base.renamed.get(name, name), side


def _peft_name(name: str) -> str | None:
    """Map a tensor's name in our shards to that in PEFT's file; None unless it belongs to an adapter."""
    if not name.endswith(NAMES):
        return None
    return PEFTS + name.removeprefix(OURS).replace(".default.weight", ".weight")
