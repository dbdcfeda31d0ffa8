"""``rl-async model import``: a model from anywhere, as a folder of safetensors with its tokenizer and chat template."""

import shutil
from pathlib import Path

from rl_async.errors import UserError
from rl_async.files import written_whole
from rl_async.launcher.plan.artifacts import check_model_folder
from rl_async.launcher.sources import gguf, hub
from rl_async.launcher.sources.fetch import PACKAGE, Snapshot, fetch, gguf_file, model_folder


def import_model(source: str, target: Path, snapshot: Snapshot = fetch) -> None:
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
        _copy(folder, partial)
        cached = hub.cached_id(str(folder))
        gguf.write_source(partial, source, **({"commit": cached[1].revision or ""} if cached else {}))


def _copy(folder: Path, target: Path) -> None:
    """Copy what would be fetched of a folder on the Hub: neither pickles nor code. Raises UserError without weights."""
    files = {file.name: file for pattern in hub.FILES["model"] for file in folder.glob(pattern) if file.is_file()}
    if not any(name.endswith(".safetensors") for name in files):
        raise UserError(f"SOURCE: {folder} has no *.safetensors; other weights are pickles: save them as safetensors")
    target.mkdir()
    for name, file in files.items():
        shutil.copyfile(file, target / name)  # the Hub's cache has links, which are followed
