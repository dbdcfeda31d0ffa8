"""Applies ``model.override``: a folder with the model's own files and a changed config.json.

Trainer, engines of all kinds, exports and the plan read a model's shape from its folder, so that none of them can miss
the change. The folder is in the cache, and its name contains a checksum of the model's path and of the new config.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from rl_async.configs.schema.data import ATTENTION_KEY, OverrideConfig, RopeConfig
from rl_async.errors import ConfigError
from rl_async.files import replace_file, written_whole
from rl_async.model_files import read_object

KEY = "model.override"
# Kinds of scaling that say from how many positions they extend, so that the largest one can be raised.
EXTENDING = ("yarn", "llama3")


def overridden_folder(folder: Path, override: OverrideConfig, cache: Path) -> Path:
    """Return a folder in ``cache`` with links to the files of ``folder`` and the changed config.json.

    A folder whose config.json already says what the override does is returned unchanged. Raises ConfigError for a model
    that it cannot be applied to, and UserError if its config.json cannot be read.
    """
    stored = read_object(folder / "config.json", "model.path")
    changed = overridden_shape(stored, override)
    if changed == stored:
        return folder
    content = json.dumps(changed, indent=2).encode()
    made = hashlib.sha256(str(folder.resolve()).encode() + content).hexdigest()[:12]
    target = cache / f"{folder.resolve().name}-{made}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            with written_whole(target) as partial:
                partial.mkdir()
                for file in folder.resolve().iterdir():
                    if file.name != "config.json":
                        (partial / file.name).symlink_to(file)
                replace_file(partial / "config.json", content)
        except OSError:
            # If the folder exists now, another process was faster.
            if not target.is_dir():
                raise
    return target


def overridden_shape(stored: dict[str, Any], override: OverrideConfig) -> dict[str, Any]:
    """Return the content of a config.json with the override applied. Raises ConfigError if it does not fit."""
    shape = dict(stored)
    if override.attention is not None:
        shape[ATTENTION_KEY] = override.attention
    if override.rope is None:
        return shape
    if "text_config" in shape:
        return shape | {"text_config": _with_rope(shape["text_config"], override.rope)}
    return _with_rope(shape, override.rope)


def _with_rope(stored: dict[str, Any], rope: RopeConfig) -> dict[str, Any]:
    """Return the config of a text model with another rotary embedding, in the form that its file has.

    Transformers 5 writes ``rope_parameters``; earlier versions wrote ``rope_scaling``, and ``rope_theta`` beside it.
    """
    shape = dict(stored)
    form = "rope_parameters" if "rope_parameters" in shape else "rope_scaling"
    had = dict(shape.get(form) or {})
    if any(isinstance(part, dict) for part in had.values()) or "rope_local_base_freq" in shape:
        raise ConfigError(f"{KEY}.rope: the model has a rotary embedding for each kind of layer; leave it out")
    if rope.rope_type is not None:
        if "mrope_section" in had:
            raise ConfigError(f"{KEY}.rope.rope_type: positions of the model's images are not scaled; leave it out")
        theta = {name: had[name] for name in ("rope_theta",) if name in had}
        trained = rope.original_max_position_embeddings or had.get("original_max_position_embeddings")
        had = {"rope_type": rope.rope_type, **rope.options, **theta}
        if rope.rope_type in EXTENDING:
            _extend(shape, had, rope, trained or shape.get("max_position_embeddings"))
    if rope.rope_theta is not None:
        (had if form == "rope_parameters" else shape)["rope_theta"] = rope.rope_theta
    return shape | {form: had or None}


def _extend(shape: dict[str, Any], had: dict[str, Any], rope: RopeConfig, trained: Any) -> None:
    """Record the positions that the model was trained on, and let the model have as many as the longer context."""
    if not isinstance(trained, int) or rope.factor is None:
        raise ConfigError(f"{KEY}.rope.original_max_position_embeddings: missing, and not in config.json either")
    had["original_max_position_embeddings"] = trained
    shape["max_position_embeddings"] = max(shape.get("max_position_embeddings", 0), int(trained * rope.factor))
