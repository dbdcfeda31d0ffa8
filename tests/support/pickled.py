"""Model folders whose weights are a pickle, which would run code when it is read."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file


def pickled(model: Path, copy: Path) -> Path:
    """Copy a model folder, with its weights as ``pytorch_model.bin`` alone; return the copy."""
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(model / "model.safetensors"), copy / "pytorch_model.bin")
    return copy
