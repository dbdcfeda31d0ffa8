"""Checks that this machine has what a run needs, and plans the run for it. Imports nothing heavy."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from rl_async.agent_loop.recorded import needed_groups
from rl_async.configs.derived.engines import engine_kinds, engine_traits
from rl_async.configs.derived.models import warm_start_of
from rl_async.configs.engines import ENGINES
from rl_async.configs.engines.traits import Experts
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.launcher.plan.artifacts import needs_preparation
from rl_async.launcher.plan.memory import model_size, tiny_shape
from rl_async.launcher.plan.planning import Plan, engines, plan
from rl_async.launcher.plan.threads import cores, with_threads
from rl_async.reward_loop.api_keys import read_api_key
from rl_async.trainer.model.families import why_not_shared

EXPERT_MODELS = ("qwen2_moe", "qwen3_moe")
EXPERTS_SENT: Mapping[str, Experts] = {"fsdp2": "stacked", "megatron": "single"}  # by trainer.backend


def plan_here(config: RunConfig, folder: Path, *, resume: bool = False, gpus: int | None = None) -> Plan:
    """Plan for this machine, or for a cluster with ``gpus`` GPUs, whose nodes check their engines later.

    Raises UserError for what is missing here: files, an engine's package, Megatron-Core, PEFT, Liger, FlashAttention, a
    required GPU, the judge's key; for experts that an engine cannot load, and rows that ranks cannot share.
    """
    elsewhere = gpus is not None
    gpus = count_gpus() if gpus is None else gpus
    if config.model.device == "cuda" and gpus == 0:
        raise UserError("model.device=cuda, but no GPU is visible; use auto or cpu")
    needs_preparation(config)
    check_trainer(config, gpus)
    if config.rollout.replay:
        needed_groups(config)
    else:
        check_api_keys(config)
    if not elsewhere and not config.rollout.replay:
        check_engines(config, on_gpus=False)
    size = model_size(config)
    check_expert_names(config)
    if not elsewhere and (gpus == 0 or config.model.device == "cpu"):
        config = with_threads(config, size, cores(), engines=engines(config))
    return plan(config, folder, size=size, gpus=gpus, resume=resume)


def check_api_keys(config: RunConfig) -> None:
    """Raise ConfigError if the environment lacks the key of a judge, an outside reward model or a user in use."""
    reward, user = config.reward, config.agent.user
    if user is not None and config.agent.environment == "simulated_user":
        read_api_key(user.api_key_env, "agent.user.api_key_env")
    for role, opponent in config.agent.opponents.items():
        read_api_key(opponent.api_key_env, f"agent.opponents.{role}.api_key_env")
    names = {term.name for term in reward.functions}
    if reward.judge is not None and "judge" in names:
        read_api_key(reward.judge.api_key_env, "reward.judge.api_key_env")
    if reward.model is not None and "reward_model" in names:
        read_api_key(reward.model.api_key_env, "reward.model.api_key_env")


def check_expert_names(config: RunConfig) -> None:
    """Raise UserError if an engine cannot load the experts of the model under the names that the trainer sends."""
    file = Path(config.model.path) / "config.json"
    if not file.is_file() or json.loads(file.read_text()).get("model_type") not in EXPERT_MODELS:
        return
    sent = EXPERTS_SENT[config.trainer.backend]
    able = [kind for kind, traits in ENGINES.items() if sent in traits.experts]
    for kind in engine_kinds(config):
        if kind not in able:
            raise UserError(
                f"model.path: {config.model.path} has experts, and rollout.engine={kind} cannot load them under the "
                f"names that trainer.backend={config.trainer.backend} sends; use rollout.engine={' or '.join(able)}, "
                "or another trainer.backend"
            )


def has_megatron() -> bool:
    """Whether Megatron-Core is installed here. Does not import it."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def check_trainer(config: RunConfig, gpus: int) -> None:
    """Raise UserError if ``config.trainer`` needs a package or a device that is missing here."""
    if config.trainer.backend == "megatron":
        check_megatron()
    if config.trainer.lora is not None:
        check_peft()
    check_kernels(config, gpus)
    check_sharing(config)


def check_megatron() -> None:
    """Raise UserError unless Megatron-Core is installed for the trainer."""
    if not has_megatron():
        raise UserError(
            f"trainer.backend=megatron: {sys.executable} has no Megatron-Core; install it with "
            "`python -m pip install 'rl-async[megatron]'`"
        )


def check_peft() -> None:
    """Raise UserError unless PEFT is installed for the trainer."""
    if find_spec("peft") is None:
        raise UserError(f"trainer.lora: {sys.executable} has no PEFT; install it with `pip install 'rl-async[lora]'`")


def check_kernels(config: RunConfig, gpus: int) -> None:
    """Raise UserError unless the configured kernels are installed and there is a GPU for them."""
    wanted = {
        "trainer.attention=flash": ("flash_attn", config.trainer.attention == "flash"),
        "trainer.kernels=liger": ("liger_kernel", config.trainer.kernels == "liger"),
    }
    for key, (module, is_wanted) in wanted.items():
        if is_wanted and gpus == 0:
            raise UserError(f"{key} needs a GPU, and none is visible; leave it out")
        if is_wanted and find_spec(module) is None:
            extra = "--no-build-isolation 'rl-async[flash-attn]'" if module == "flash_attn" else "'rl-async[liger]'"
            raise UserError(f"{key}: {sys.executable} has no {module}; install it with `pip install {extra}`")


def check_sharing(config: RunConfig) -> None:
    """Raise UserError if ``config.json`` of the policy shows that trainer ranks cannot share its rows."""
    file, ranks = Path(config.model.path) / "config.json", config.trainer.sequence_parallel
    if ranks == 1:
        return
    makes = warm_start_of(config)
    shape = tiny_shape(makes) | {"model_type": "qwen3"} if makes and makes.pretrained is None else {}
    if file.is_file():
        shape = json.loads(file.read_text())
    if {"model_type", "num_attention_heads"} <= shape.keys() and (
        reason := why_not_shared(SimpleNamespace(**shape), ranks)
    ):
        raise UserError(f"trainer.sequence_parallel={ranks} does not go with model.path={config.model.path}: {reason}")


def check_engines(config: RunConfig, *, on_gpus: bool) -> None:
    """Raise UserError unless this machine can start the run's engines of the kinds that need a GPU, or of the others.

    The plan checks the others alone, so that a run on GPUs can be planned on any machine.
    """
    for kind, traits in engine_traits(config).items():
        if traits.needs_gpu != on_gpus:
            continue
        if on_gpus and (config.model.device == "cpu" or count_gpus() == 0):
            others = " or ".join(other for other, them in ENGINES.items() if not them.needs_gpu)
            raise UserError(
                f"rollout.engine={kind}: {traits.title} needs a GPU, and none is visible or model.device=cpu; use "
                f"rollout.engine={others}, or a machine with a GPU"
            )
        check_engine_python(kind, config.rollout.python or sys.executable)


def count_gpus() -> int:
    """Count the GPUs that processes started from here may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check_engine_python(kind: str, python: str) -> None:
    """Raise UserError unless this Python has the engine's package, if it needs one, with rl-async beside it.

    Imports neither.
    """
    traits = ENGINES[kind]
    if not traits.package:
        return
    beside = "bool(u.find_spec('rl_async'))"
    if traits.plugin is not None:
        group, plugin = traits.plugin
        beside = f"{plugin!r} in {{p.value for p in m.entry_points(group={group!r})}}"
    probe = (
        f"import importlib.util as u, importlib.metadata as m\nprint(bool(u.find_spec({traits.package!r})), {beside})"
    )
    found = _ask(python, probe)[-2:]
    if found[0] != "True":
        raise UserError(f"rollout.engine={kind}: {python} has no {traits.title}; {traits.install}")
    if found[1] != "True":
        raise UserError(
            f"rollout.python: {python} has {traits.title} but not rl-async beside it; run `{python} -m pip install "
            "--no-deps PATH-OF-RL-ASYNC` (and xxhash)"
        )


def _ask(python: str, code: str) -> list[str]:
    """Return the words that ``code`` prints in that Python. Raises UserError if it cannot be run."""
    command = [python, "-P", "-c", code]  # -P: a folder named vllm in the working directory is not vLLM
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"rollout.python: {python} cannot be run: {error}") from error
    return done.stdout.split()
