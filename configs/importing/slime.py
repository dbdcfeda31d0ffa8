"""slime's flags (`slime/utils/arguments.py`, commit 002fa9d6) and those of Megatron's that its scripts use."""

from pathlib import Path

from rl_async.configs.importing.translation import Key, Translation, flags, overridden, resolve_references
from rl_async.configs.suggestions import ESTIMATORS

KEYS = (
    Key("hf-checkpoint", "model.path"),
    Key("prompt-data", "data.path"),
    Key("rollout-shuffle", "data.shuffle", False),
    Key("rollout-batch-size", "data.train_batch_groups"),
    Key("n-samples-per-prompt", "rollout.group_size", 1),
    Key("rollout-max-response-len", "rollout.max_tokens"),
    Key("rollout-max-context-len", "rollout.max_model_len"),
    Key("rollout-temperature", "rollout.temperature", 1.0),
    Key("rollout-top-p", "rollout.top_p", 1.0),
    Key("rollout-top-k", "rollout.top_k", -1, lambda k: max(k, 0)),  # -1 is off there, 0 here
    Key("rollout-max-prompt-len", "data.max_prompt_tokens"),
    Key("num-rollout", "trainer.steps"),
    Key("lr", "trainer.learning_rate", 1e-6),
    Key("lr-decay-style", "trainer.schedule", "linear"),
    Key("lr-warmup-iters", "trainer.warmup_steps"),
    Key("weight-decay", "trainer.weight_decay", 0.01),
    Key("adam-beta1", "trainer.beta1", 0.9),
    Key("adam-beta2", "trainer.beta2", 0.999),
    Key("clip-grad", "trainer.grad_clip", 1.0),
    Key("rollout-num-gpus-per-engine", "rollout.tensor_parallel", 1),
    Key("tensor-model-parallel-size", "trainer.tensor_parallel"),
    Key("pipeline-model-parallel-size", "trainer.pipeline_parallel"),
    Key("context-parallel-size", "trainer.sequence_parallel"),
    Key("expert-model-parallel-size", "trainer.expert_parallel"),
    Key("save-interval", "trainer.checkpoint_every"),
    Key("eval-interval", "eval.every"),
    Key("n-samples-per-eval-prompt", "eval.samples"),
    Key("wandb-project", "tracking.project"),
    Key("seed", "seed", 1234),
    Key("eps-clip", "algorithm.clip_low", 0.2),
    Key("eps-clip-c", "algorithm.loss_options.clip_dual"),
    Key("entropy-coef", "algorithm.entropy_coef", 0.0),
    Key("gamma", "algorithm.advantage_options.gamma", 1.0),
    Key("lambd", "algorithm.advantage_options.lam", 1.0),
)
_LAYOUT = "devices are trainer.ranks and rollout.engines here; `rl-async plan` helps to choose"
_RAY = "an option of Ray"
_MEGATRON = "a setting of Megatron that is fixed or absent here"
NO_COUNTERPART = {
    **dict.fromkeys(("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus"), _LAYOUT),
    "colocate": "give --mode colocated to `rl-async launch`",
    **dict.fromkeys(("rm-type", "custom-rm-path"), "rewards are reward.functions"),
    **dict.fromkeys(("head", "node-ip-address", "num-gpus", "disable-usage-stats", "dashboard-host"), _RAY),
    **dict.fromkeys(("dashboard-port", "address", "runtime-env-json", "force"), _RAY),
    **dict.fromkeys(("ref-load", "load", "save"), "checkpoints are in the run's folder, in Hugging Face's format"),
    **dict.fromkeys(("input-key", "label-key", "apply-chat-template"), "columns are verl's, prompt and reward_model"),
    **dict.fromkeys(("balance-data", "use-dynamic-batch-size", "micro-batch-size"), "rows are always packed"),
    **dict.fromkeys(("recompute-granularity", "recompute-method", "recompute-num-layers"), _MEGATRON),
    **dict.fromkeys(("attention-dropout", "hidden-dropout", "attention-backend", "sequence-parallel"), _MEGATRON),
    **dict.fromkeys(("accumulate-allreduce-grads-in-fp32", "attention-softmax-in-fp32"), _MEGATRON),
    **dict.fromkeys(("expert-tensor-parallel-size", "optimizer"), _MEGATRON),
    "dynamic-sampling-filter-path": "algorithm.shaping.dynamic_sampling gives up groups whose rewards are all equal",
    **dict.fromkeys(("use-opsm", "opsm-delta", "use-unbiased-kl", "use-routing-replay"), "not here"),
    **dict.fromkeys(("eval-max-response-len", "eval-top-p"), "evaluation has the run's lengths, and eval.temperature"),
}


def write(file: Path, more: list[str]) -> str:
    """Our YAML for the flags in the script ``file``; ``more`` is further ``flag=value``."""
    given, unresolved = resolve_references(overridden(flags(file), more, "an argument"))
    t = Translation(given, notes=unresolved)
    t.translate(KEYS)
    t.put("trainer.backend", "megatron", "train-backend")
    t.take("train-backend")
    t.put("rollout.engine", "sglang", "sglang")
    high = t.take("eps-clip-high")
    t.put("algorithm.clip_high", t.take("eps-clip", 0.2) if high is None else high, "eps-clip-high", "eps-clip")
    _batch(t)
    _advantage(t)
    _kl(t)
    _correction(t)
    held_out = t.take("eval-prompt-data")
    if held_out:
        t.put("data.eval_path", held_out[-1] if isinstance(held_out, list) else held_out, "eval-prompt-data")
    if t.take("use-wandb"):
        t.put("tracking.backends", ["wandb"], "use-wandb")
    t.put("queue.max_staleness", 0, "train_async.py")
    t.notes.append("slime's train.py is synchronous, train_async.py is queue.max_staleness=1")
    t.notes.append("flags of files that the script sources (the model's) are not read; the model's shape is its own")
    return t.text(f"From {file} (slime).", NO_COUNTERPART)


def _batch(t: Translation) -> None:
    tasks, rows = t.number("rollout-batch-size", 0), t.number("global-batch-size", 0)
    group = t.number("n-samples-per-prompt", 1)
    if per_gpu := t.number("max-tokens-per-gpu", 0):  # ranks that share a row count their parts there, it whole here
        tokens = per_gpu * t.number("context-parallel-size", 1)
        t.put("trainer.max_tokens_per_microbatch", tokens, "max-tokens-per-gpu")
    if tasks and rows:
        t.put("trainer.minibatches", max(tasks * group // rows, 1), "global-batch-size", "rollout-batch-size")
    elif steps := t.take("num-steps-per-rollout"):
        t.put("trainer.minibatches", steps, "num-steps-per-rollout")


def _advantage(t: Translation) -> None:
    """slime's estimator names loss and advantage at once; a row counts once unless told otherwise."""
    name = t.take("advantage-estimator", "grpo")
    no_deviation = t.take("disable-grpo-std-normalization", False)
    group = {"ppo": "gae", "gspo": "grpo", "cispo": "grpo"}.get(name, name)
    t.put("algorithm.advantage", "dr_grpo" if no_deviation and group == "grpo" else group, "advantage-estimator")
    t.put("algorithm.loss", name if name in ("gspo", "cispo") else "ppo", "advantage-estimator")
    if group == "gae":
        t.put("critic.clip", t.take("value-clip", 0.2), "value-clip")
    per_token = t.take("calculate-per-token-loss", False)
    aggregation = "token-mean" if per_token else "seq-mean-token-mean"
    t.put("algorithm.aggregation", aggregation, "calculate-per-token-loss")


def _kl(t: Translation) -> None:
    estimator = t.take("kl-loss-type", "k1")
    coef, in_reward = t.take("kl-loss-coef", 0.0), t.take("kl-coef", 0.0)
    if t.take("use-kl-loss", False):
        t.put("algorithm.kl.coef", coef, "kl-loss-coef")
        t.put("algorithm.kl.estimator", ESTIMATORS.get(estimator, estimator), "kl-loss-type")
    elif in_reward:
        t.put("algorithm.kl.coef", in_reward, "kl-coef")
        t.put("algorithm.kl.estimator", ESTIMATORS.get(estimator, estimator), "kl-loss-type")
        t.put("algorithm.kl.place", "reward", "kl-coef")


def _correction(t: Translation) -> None:
    low, cap = t.take("tis-clip-low", 0), t.take("tis-clip", 2.0)
    if t.take("use-rollout-logprobs", False):
        t.put("algorithm.correction", "bypass_ppo_clip", "use-rollout-logprobs")
    elif t.take("use-tis", False):
        t.put("algorithm.correction", "slime_tis", "use-tis")
        t.put("algorithm.correction_options.cap", cap, "tis-clip") if cap != 2.0 else None
        if low:
            t.notes.append(f"tis-clip-low={low}: a weight has no lower bound here")
    else:
        t.put("algorithm.correction", "disabled", "use-tis")
