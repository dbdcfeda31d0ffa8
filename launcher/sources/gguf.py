"""GGUF files as Hugging Face folders: weights dequantised to safetensors, the tokenizer, its chat template."""

import hashlib
import importlib.util
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_async.errors import ConfigError
from rl_async.files import written_whole

SOURCE_FILE = "source.json"  # in a folder that was imported: from what
# What Transformers and the package gguf raise for broken files and for models that they do not know.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, ImportError, ArithmeticError),
    *(struct.error, MemoryError),
)


def cache_folder() -> Path:
    """Return the folder in which converted models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-async" / "models"


def folder_of(file: Path) -> Path:
    """Return where a GGUF file is kept in converted form; its name has the checksum of what the file holds."""
    return cache_folder() / f"{file.stem}-{_checksum(file)[:12]}"


def converted(file: Path, key: str) -> Path:
    """Convert a GGUF file into the cache, unless it was; return the folder. Raises ConfigError, naming ``key``."""
    folder = folder_of(file)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with written_whole(folder) as partial:
                convert(file, partial, key)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


def convert(file: Path, target: Path, key: str) -> None:
    """Write the model and tokenizer of a GGUF file into ``target``, in float32: a dequantised weight has no shorter
    type that holds it exactly. Raises ConfigError, naming ``key``, for what Transformers cannot read.
    """
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
        raise ConfigError(f"{key}: to read {file.name}, install what reads it: `pip install 'rl-async[gguf]'`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = str(file.parent)
    try:
        with _quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=file.name, trust_remote_code=False)
            read: Any = AutoModelForCausalLM.from_pretrained(
                where, gguf_file=file.name, trust_remote_code=False, dtype=torch.float32
            )
            # A model that was read from GGUF counts as quantised and refuses to be saved; a new one takes its weights.
            shape = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
            model = type(read)(type(read.config).from_dict(shape)).to(torch.float32)
            model.load_state_dict(read.state_dict())
            model.tie_weights()
            model.generation_config = read.generation_config
            tokenizer.model_max_length = min(tokenizer.model_max_length, read.config.max_position_embeddings)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except _UNREADABLE as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{key}: {file} cannot be read as a causal LM with its tokenizer: {reason}") from error
    write_source(target, str(file), sha256=_checksum(file))


def write_source(folder: Path, source: str, **facts: str) -> None:
    """Record in a model folder what it was made from."""
    (folder / SOURCE_FILE).write_text(json.dumps({"source": source, **facts}) + "\n")


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Show none of Transformers' progress bars and notices while the block runs."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
