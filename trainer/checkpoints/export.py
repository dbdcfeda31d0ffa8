"""Exports a checkpoint's shards as Hugging Face safetensors, which other tools read."""

import glob
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import AutoTokenizer

from rl_async.errors import UserError
from rl_async.files import GENERATION_CONFIG, written_whole
from rl_async.trainer.checkpoints.adapters import ADAPTER_FOLDER, write_merged
from rl_async.trainer.checkpoints.folder import damage_of, list_checkpoints
from rl_async.trainer.checkpoints.shards import MOMENT, StoredShards, write_whole
from rl_async.trainer.model.heads import MODEL_FOLDER, VALUE_HEAD, VALUE_HEAD_FILE

SHARDS = "shards"
WEIGHTS = "lm."  # prefix of the language model's parameters
WHOLE = "model.safetensors"


def write_described(folder: Path, config: Any, tokenizer: str | None, complete: bool) -> None:
    """Write what other tools read beside the shards of ``folder``: a Hugging Face folder, and a value head if there is
    one.

    ``config`` is the model's; ``tokenizer`` is the folder of the tokenizer and of the generation config to copy, None
    for a model without logits.
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
    if names:  # not in the model's folder, from which engines load every tensor
        save_file({name.removeprefix(VALUE_HEAD): shards.whole(name) for name in names}, folder / VALUE_HEAD_FILE)


def copy_text_files(source: Path, target: Path) -> None:
    """Copy what a model needs to read and write text: its tokenizer, and its generation config, which may name more
    tokens that end a turn than the tokenizer does."""
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(target)
    if (source / GENERATION_CONFIG).is_file():
        shutil.copy(source / GENERATION_CONFIG, target)


def write_model(folder: Path, target: Path | None = None) -> None:
    """Write the language model's weights to ``target``, by default beside the config in ``folder``'s Hugging Face
    folder.

    Adapters are merged into their base. Not a collective. Raises UserError if the base's weights have changed.
    """
    target = target or folder / MODEL_FOLDER / WHOLE
    if (folder / ADAPTER_FOLDER).is_dir():
        write_merged(folder / ADAPTER_FOLDER, target)
    else:
        config = json.loads((folder / MODEL_FOLDER / "config.json").read_text())
        write_whole(folder / SHARDS, target, _hf_name, config["model_type"])


def _hf_name(name: str) -> str | None:
    return name.removeprefix(WEIGHTS) if name.startswith(WEIGHTS) and MOMENT not in name else None


def export(run: Path, out: Path, step: int | None = None, part: str = ".") -> int:
    """Write the Hugging Face folder ``out`` from the checkpoint of ``step``, by default the newest; return the step.

    ``part`` is the model's folder within the checkpoint: ``.`` for the policy, ``critic`` for a critic with a model of
    its own, whose value head is copied too. Raises UserError if there is no such checkpoint, it is damaged, or ``out``
    exists.
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
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not exist yet")
    for left in out.parent.glob(f".{glob.escape(out.name)}.[0-9]*"):
        shutil.rmtree(left)  # whole weights, of an export that was killed
    with written_whole(out) as temporary:
        shutil.copytree(folder / part / MODEL_FOLDER, temporary)
        if not (temporary / WHOLE).is_file():
            write_model(folder / part, temporary / WHOLE)
        if part != "." and (folder / part / VALUE_HEAD_FILE).is_file():
            shutil.copy(folder / part / VALUE_HEAD_FILE, temporary)
    return chosen
