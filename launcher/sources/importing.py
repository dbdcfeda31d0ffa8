"""``rl-async model import``: a model from anywhere, as a folder of safetensors with its tokenizer and chat template."""

import shutil
from pathlib import Path

from rl_async.errors import UserError
from rl_async.files import written_whole
from rl_async.launcher.plan.artifacts import check_model_folder
from rl_async.launcher.sources import gguf, hub
from rl_async.launcher.sources.fetch import PACKAGE, Snapshot, gguf_file, model_folder


def import_model(source: str, target: Path, snapshot: Snapshot = hub.snapshot) -> None:
    """Write the model that ``source`` names into ``target``, whole or not at all. Raises UserError."""
    if target.exists():
        raise UserError(f"{target} exists; delete it, or choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as partial:
        if source.startswith(PACKAGE) or source.endswith(".gguf"):
            gguf.convert(gguf_file(source, "SOURCE"), partial, "SOURCE")
            return
        folder = model_folder(source, "SOURCE", snapshot)
        check_model_folder(folder, "SOURCE")
        shutil.copytree(folder, partial)  # the Hub's cache has links, which are followed
        cached = hub.cached_id(str(folder))
        gguf.write_source(partial, source, **({"commit": cached[1].revision or ""} if cached else {}))
