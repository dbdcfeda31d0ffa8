"""Out of a checkpoint's shards into Hugging Face safetensors, as every other tool reads them."""

import shutil
from pathlib import Path

from rl_async.errors import UserError
from rl_async.files import written_whole
from rl_async.trainer.checkpoints.adapters import ADAPTER_FOLDER, write_merged
from rl_async.trainer.checkpoints.folder import damage_of, list_checkpoints
from rl_async.trainer.checkpoints.shards import write_whole
from rl_async.trainer.model.heads import MODEL_FOLDER, VALUE_HEAD_FILE

SHARDS = "shards"
WEIGHTS = "lm."  # before the names of the language model's parameters
MOMENT = "|"  # between the name of a parameter and that of a tensor of AdamW
WHOLE = "model.safetensors"


def write_model(folder: Path, target: Path | None = None) -> None:
    """Put the language model's weights into the file ``target``, by default beside its config in ``folder``'s Hugging
    Face folder. Of adapters, those merged into their base. No collective.

    Raises UserError if the base is not what it was.
    """
    target = target or folder / MODEL_FOLDER / WHOLE
    if (folder / ADAPTER_FOLDER).is_dir():
        write_merged(folder / ADAPTER_FOLDER, target)
    else:
        write_whole(folder / SHARDS, target, _hf_name)


def _hf_name(name: str) -> str | None:
    return name.removeprefix(WEIGHTS) if name.startswith(WEIGHTS) and MOMENT not in name else None


def export(run: Path, out: Path, step: int | None = None, part: str = ".") -> int:
    """Write the Hugging Face folder ``out`` from the checkpoint of ``step``, by default the newest; returns the step.

    ``part`` is the model's folder within the checkpoint: ``.`` the policy, ``critic`` a critic with a model of its own,
    whose value head comes along. Raises UserError if there is no such checkpoint, or it is damaged, or ``out`` exists.
    """
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
        raise UserError(f"{out} exists; give a folder that does not")
    with written_whole(out) as temporary:
        shutil.copytree(folder / part / MODEL_FOLDER, temporary)
        if not (temporary / WHOLE).is_file():
            write_model(folder / part, temporary / WHOLE)
        if part != "." and (folder / part / VALUE_HEAD_FILE).is_file():
            shutil.copy(folder / part / VALUE_HEAD_FILE, temporary)
    return chosen
