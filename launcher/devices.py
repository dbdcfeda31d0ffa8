"""How many GPUs there are, without importing torch."""

import os
from pathlib import Path


def count_gpus() -> int:
    """GPUs that processes started from here may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
