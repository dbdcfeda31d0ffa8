"""TRL's GRPOConfig, as of version 1.16, with the TrainingArguments that it extends."""

from pathlib import Path

from rl_async.configs.importing.translation import (
    Key,
    Translation,
    Values,
    calls,
    flags,
    our_default,
    overridden,
    read_settings,
    resolve_references,
)

KEYS = (
    Key("model_name_or_path", "model.path"),  # of ModelConfig, which TRL's scripts read from the same file
    Key("dataset_name", "data.path"),  # of ScriptArguments
    Key("num_generations", "rollout.group_size", 8),
    Key("temperature", "rollout.temperature", 1.0),
    Key("top_p", "rollout.top_p", 1.0),
    Key("top_k", "rollout.top_k", 0),
    Key("max_completion_length", "rollout.max_tokens", 512),
    Key("vllm_max_model_length", "rollout.max_model_len"),
    Key("shuffle_dataset", "data.shuffle", True),
    Key("learning_rate", "trainer.learning_rate", 1e-6),
    Key("weight_decay", "trainer.weight_decay", 0.0),
    Key("adam_beta1", "trainer.beta1", 0.9),
    Key("adam_beta2", "trainer.beta2", 0.999),
    Key("max_grad_norm", "trainer.grad_clip", 1.0),
    Key("lr_scheduler_type", "trainer.schedule", "linear", lambda name: str(name).removesuffix("_with_warmup")),
    Key("warmup_steps", "trainer.warmup_steps", 0),
    Key("num_iterations", "trainer.epochs", 1),
    Key("max_steps", "trainer.steps", skip=(None, -1)),
    Key("save_steps", "trainer.checkpoint_every", 500),
    Key("save_total_limit", "trainer.keep_checkpoints"),
    Key("gradient_checkpointing", "trainer.activation_checkpointing", True),
    Key("eval_steps", "eval.every"),
    Key("seed", "seed", 42),
    Key("epsilon", "algorithm.clip_low", 0.2),
    Key("delta", "algorithm.loss_options.clip_dual"),
    Key("sapo_temperature_pos", "algorithm.loss_options.sapo_tau_positive", 1.0),
    Key("sapo_temperature_neg", "algorithm.loss_options.sapo_tau_negative", 1.05),
    Key("beta", "algorithm.kl.coef", 0.0),
    Key("entropy_coef", "algorithm.entropy_coef", 0.0),
    Key("mask_truncated_completions", "algorithm.shaping.overlong_filter", False),
    Key("max_tool_calling_iterations", "agent.max_turns", convert=lambda turns: turns + 1),
)
AGGREGATION = {
    **dict.fromkeys(("grpo", "sapo"), "seq-mean-token-mean"),
    **dict.fromkeys(("bnpo", "dapo", "cispo"), "token-mean"),
    "dr_grpo": "seq-mean-token-sum-norm",
}
CLASSES = ("GRPOConfig", "ModelConfig", "ScriptArguments")
TRACKERS = ("tensorboard", "swanlab", "wandb", "mlflow")
NO_COUNTERPART = {
    "per_device_train_batch_size": "micro-batches are packed to trainer.max_tokens_per_microbatch",
    "num_train_epochs": "a run ends after trainer.steps",
    **dict.fromkeys(("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"), "there is no VESPO"),
    **dict.fromkeys(("top_entropy_quantile", "off_policy_mask_threshold", "min_p", "repetition_penalty"), "not here"),
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), "the reference stays"),
    "reward_weights": "weights are those of reward.functions",
    "output_dir": "give the run's name to `rl-async launch` as --name",
    "warmup_ratio": "write it as trainer.warmup_steps, in optimizer steps",
}


def write(file: Path, more: list[str]) -> str:
    """Our YAML for the fields in ``file`` and the ``name=value`` in ``more``."""
    given, unresolved = _read(file)
    t = Translation(overridden(given, more, "an argument"), notes=unresolved)
    t.translate(KEYS)
    _length(t)
    _loss(t)
    _batches(t)
    _correction(t)
    scale = {True: "group", False: "none"}.get(value := t.take("scale_rewards", "group"), value)
    t.put("algorithm.advantage", {"none": "dr_grpo"}.get(str(scale), "grpo"), "scale_rewards")
    if scale == "batch":
        t.notes.append("scale_rewards=batch divides by the batch's deviation, which has no counterpart; written: grpo")
    if t.take("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        t.put("algorithm.advantage", "gdpo", "multi_objective_aggregation")
        t.notes.append("gdpo: TRL whitens over rows, ours over tokens")
    if t.take("use_bias_correction_kl", True) and t.take("beta", 0.0):
        t.notes.append("use_bias_correction_kl, on in TRL by default, has no counterpart; k3 is at most 10 here")
    t.put("model.dtype", "bfloat16" if t.take("bf16", True) else "float32", "bf16")
    reports = t.take("report_to", [])
    names = reports if isinstance(reports, list) else [reports]
    t.put("tracking.backends", [name for name in names if name in TRACKERS], "report_to")
    t.put("queue.max_staleness", 0, "GRPOTrainer")
    t.notes.append("GRPOTrainer is synchronous; with queue.max_staleness=1 generation overlaps with training")
    t.notes.append("reward functions are arguments of GRPOTrainer in TRL; here they are reward.functions")
    return t.text(f"From {file} (TRL, read by the fields of GRPOConfig 1.16).", NO_COUNTERPART)


def _read(file: Path) -> tuple[Values, list[str]]:
    """The fields in a config file, a Python program or a script with flags, and what of them cannot be known."""
    if file.suffix == ".py":
        return calls(file, CLASSES)
    if file.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        return resolve_references({name.replace("-", "_"): value for name, value in flags(file).items()})
    return read_settings(file), []


def _length(t: Translation) -> None:
    """`num_train_epochs`, after which TRL ends if there is no ``max_steps``."""
    if t.take("max_steps") in (None, -1):
        epochs, key = t.take("num_train_epochs", 3.0), "trainer.steps"
        t.notes.append(
            f"num_train_epochs={epochs}: TRL ends after so many passes over the data, a run here after {key} "
            f"({our_default(key)} if not set); as many passes take {epochs} * prompts / data.train_batch_groups steps"
        )


def _loss(t: Translation) -> None:
    kind, level = t.take("loss_type", "dapo"), t.take("importance_sampling_level", "token")
    high = t.take("epsilon_high") or t.take("epsilon", 0.2)
    if kind == "cispo":
        t.put("algorithm.clip_low", 1.0, "loss_type")
        high -= 1.0  # there the bound of r itself
    t.put("algorithm.clip_high", high, "epsilon_high", "epsilon")
    if kind not in AGGREGATION:
        t.notes.append(f"loss_type={kind} has no counterpart; choose algorithm.loss")
        return
    loss = kind if kind in ("cispo", "sapo") else ("gspo" if level == "sequence" else "ppo")
    t.put("algorithm.loss", loss, "loss_type", "importance_sampling_level")
    t.put("algorithm.aggregation", AGGREGATION[kind], "loss_type")
    if kind == "dr_grpo":
        t.notes.append("dr_grpo: TRL divides by max_completion_length, ours by rollout.max_model_len")


def _batches(t: Translation) -> None:
    """Prompts a step and optimizer steps, which TRL derives from the number of its processes."""
    accumulation = t.number("gradient_accumulation_steps", 1)
    batch, steps = t.take("generation_batch_size"), t.take("steps_per_generation")
    group = t.number("num_generations", 8)
    names = ("generation_batch_size", "steps_per_generation", "per_device_train_batch_size")
    device = t.number("per_device_train_batch_size", 8)
    if batch is None:
        batch = device * (steps or accumulation)
        t.notes.append(f"data.train_batch_groups: for one process; times the number of TRL's processes ({batch} rows)")
    steps = steps or max(batch // device, 1) if t.given.get("generation_batch_size") else steps or accumulation
    t.put("data.train_batch_groups", max(batch // group, 1), *names)
    t.put("trainer.minibatches", max(steps // accumulation, 1), *names)


def _correction(t: Translation) -> None:
    """`vllm_importance_sampling_*`, which act with ``use_vllm`` alone."""
    on = t.take("use_vllm", False) and t.take("vllm_importance_sampling_correction", True)
    t.take("vllm_importance_sampling_correction")
    mode = t.take("vllm_importance_sampling_mode", "sequence_mask")
    top = t.take("vllm_importance_sampling_clip_max", 3.0)
    low = t.take("vllm_importance_sampling_clip_min") or 0
    if t.take("use_vllm", False):
        t.put("rollout.engine", "vllm", "use_vllm")
        t.put("rollout.tensor_parallel", t.take("vllm_tensor_parallel_size", 1), "vllm_tensor_parallel_size")
    if not on:
        t.put("algorithm.correction", "disabled", "use_vllm")
        return
    level, _, what = mode.partition("_")
    t.put(
        "algorithm.correction",
        f"decoupled_{'token' if level == 'token' else 'seq'}_is",
        "vllm_importance_sampling_mode",
    )
    if what == "mask":
        t.put("algorithm.correction_options.band", f"{low}_{top}", "vllm_importance_sampling_clip_max")
    else:
        t.put("algorithm.correction_options.cap", top, "vllm_importance_sampling_clip_max")
        if low:
            t.notes.append("vllm_importance_sampling_clip_min has no counterpart beside a cap")
