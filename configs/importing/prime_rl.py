"""prime-rl's `rl` command, as its repository has it in 2026, and some of the keys that it had before."""

from pathlib import Path

from rl_async.configs.importing.translation import Key, Translation, overridden, read_settings

OPTIMIZER, LOSS, SAMPLING = "trainer.optim", "trainer.loss", "orchestrator.train.sampling"
KEYS = (
    Key("model.name", "model.path"),
    Key("max_steps", "trainer.steps"),
    Key("seq_len", "rollout.max_model_len", 2048),
    Key("seq_len", "agent.max_tokens", 2048),
    Key("orchestrator.group_size", "rollout.group_size", 1),
    Key(f"{SAMPLING}.temperature", "rollout.temperature", 1.0),
    Key(f"{SAMPLING}.max_completion_tokens", "rollout.max_tokens"),
    Key("orchestrator.sampling.max_tokens", "rollout.max_tokens"),  # older
    Key("orchestrator.sampling.temperature", "rollout.temperature"),
    Key("orchestrator.max_off_policy_steps", "queue.max_staleness", 8),
    Key(f"{OPTIMIZER}.lr", "trainer.learning_rate", 1e-6),
    Key(f"{OPTIMIZER}.weight_decay", "trainer.weight_decay", 0.01),
    Key(f"{OPTIMIZER}.max_norm", "trainer.grad_clip", 1.0),
    Key(f"{OPTIMIZER}.betas1", "trainer.beta1", 0.9),
    Key(f"{OPTIMIZER}.betas2", "trainer.beta2", 0.999),
    Key("trainer.scheduler.type", "trainer.schedule", "constant"),
    Key("trainer.scheduler.warmup_steps", "trainer.warmup_steps"),
    Key("inference.parallel.tp", "rollout.tensor_parallel"),
    Key("trainer.model.tp", "trainer.tensor_parallel"),
    Key("trainer.model.cp", "trainer.sequence_parallel"),
    Key("trainer.model.fsdp_cpu_offload", "trainer.cpu_offload"),
    Key("trainer.model.lora.rank", "trainer.lora.rank"),
    Key("trainer.model.lora.alpha", "trainer.lora.alpha"),
    Key("ckpt.interval", "trainer.checkpoint_every"),
    Key("ckpt.keep_last", "trainer.keep_checkpoints"),
    Key("deployment.num_train_gpus", "trainer.ranks"),
    Key("wandb.project", "tracking.project"),
)
NO_COUNTERPART = {
    "orchestrator.train.env": "environments are data.path, agent.environment and reward.functions",
    "orchestrator.env": "environments are data.path, agent.environment and reward.functions",
    "orchestrator.eval": "evaluation is data.eval_path and the section eval",
    "orchestrator.renderer": "chats are rendered by the model's own template",
    "trainer.loss": "a number of another loss",
    "inference.parallel.dp": "copies of the model are rollout.engines",
    "inference": "an engine's own settings; rollout.engine_args passes flags on",
    "wandb": "give the run's name to `rl-async launch` as --name",
    "orchestrator": "not read",
    "trainer": "not read",
    **dict.fromkeys(("slurm", "deployment", "ckpt", "log", "output_dir", "weight_broadcast", "model"), "not here"),
}


def write(file: Path, more: list[str]) -> str:
    """Our YAML for the TOML in ``file`` and the ``a.b=c`` in ``more``."""
    t = Translation(overridden(read_settings(file), more, "an argument"))
    t.translate(KEYS)
    rows, group = t.number("orchestrator.batch_size", 128), t.number("orchestrator.group_size", 1)
    t.put("data.train_batch_groups", max(rows // group, 1), "orchestrator.batch_size", "orchestrator.group_size")
    t.put("trainer.minibatches", 1, "trainer")
    if gpus := t.number("deployment.num_infer_gpus", 0):
        engines = max(gpus // t.number("inference.parallel.tp", 1), 1)
        t.put("rollout.engines", engines, "deployment.num_infer_gpus", "inference.parallel.tp")
    t.put("rollout.engine", "vllm", "inference")
    t.put("algorithm.advantage", "dr_grpo", "orchestrator.algo")  # reward - mean of the group
    _loss(t)
    if any(key.startswith("wandb.") for key in t.given):
        t.put("tracking.backends", ["wandb"], "wandb.project", "wandb.name")
    if t.take("orchestrator.token_batch_size"):
        t.notes.append("orchestrator.token_batch_size: a batch is a number of tasks here, data.train_batch_groups")
    t.notes.append("prime-rl drops a row that is too old; queue.max_staleness bounds it by admission")
    return t.text(f"From {file} (prime-rl).", NO_COUNTERPART)


def _loss(t: Translation) -> None:
    """prime-rl's default loss, DPPO with a penalty, is the preset `prime_rl`."""
    kind = t.take(f"{LOSS}.type", "default")
    if kind != "default":
        t.notes.append(f"{LOSS}.type={kind} has no counterpart; choose algorithm.loss and algorithm.correction")
        return
    t.put("algorithm.correction", "prime_rl", f"{LOSS}.type")
    low, high = t.take(f"{LOSS}.dppo_mask_low", 0.2), t.take(f"{LOSS}.dppo_mask_high", 0.2)
    t.put("algorithm.loss_options.dppo_tv", low, f"{LOSS}.dppo_mask_low")
    if low != high:
        t.put("algorithm.loss_options.dppo_high", high, f"{LOSS}.dppo_mask_high")
    t.put("algorithm.loss_options.ipo_penalty", t.take(f"{LOSS}.kl_tau", 1e-3), f"{LOSS}.kl_tau")
    if (tau := t.take(f"{LOSS}.adv_tau", 1.0)) != 1.0:
        t.notes.append(f"{LOSS}.adv_tau={tau} has no counterpart")
