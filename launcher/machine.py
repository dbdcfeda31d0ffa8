"""The plan of a run for the machine this is, checked against what is there. Imports nothing heavy."""

import os
from pathlib import Path

from rl_async.configs.schema import RunConfig
from rl_async.errors import UserError
from rl_async.launcher.artifacts import needs_preparation
from rl_async.launcher.memory import model_size
from rl_async.launcher.plan import Plan, plan
from rl_async.reward_loop.judge import api_key


def plan_here(config: RunConfig, folder: Path, *, resume: bool = False) -> Plan:
    """The plan for this machine. Raises UserError for what is missing here: files, a GPU asked for, the judge's key."""
    gpus = count_gpus()
    if config.model.device == "cuda" and gpus == 0:
        raise UserError("model.device=cuda, but no GPU is visible; use auto or cpu")
    needs_preparation(config)
    if config.reward.judge is not None and any(term.name == "judge" for term in config.reward.functions):
        api_key(config.reward.judge)
    return plan(config, folder, size=model_size(config), gpus=gpus, resume=resume)


def count_gpus() -> int:
    """GPUs that processes started from here may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
