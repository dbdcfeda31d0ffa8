"""Configs as a run has them once its compute type is settled."""

from collections.abc import Sequence

from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig


def float32_config(
    name_or_path: str | None, overrides: Sequence[str] = (), *, mode: str | None = None, name: str = ""
) -> RunConfig:
    """Load a config with ``model.dtype=float32``, which overrides may change."""
    return load_config(name_or_path, ["model.dtype=float32", *overrides], mode=mode, name=name)
