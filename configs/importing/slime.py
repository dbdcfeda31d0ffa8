"""slime's flags (`slime/utils/arguments.py`, commit 002fa9d6) and those of Megatron's that its scripts use."""

import re
from pathlib import Path
from typing import Any

from rl_async.configs.importing.translation import (
    EVERY_TASK,
    FILL_IN,
    Key,
    Translation,
    count_rows,
    our_default,
    overridden,
    resolve_references,
    script_flags,
)
from rl_async.configs.suggestions import ESTIMATORS

KEYS = (
    Key("hf-checkpoint", "model.path"),
    Key("rollout-shuffle", "data.shuffle", False),
    Key("rollout-batch-size", "data.train_batch_groups"),
    Key("n-samples-per-prompt", "rollout.group_size", 1),
    Key("rollout-max-response-len", "rollout.max_tokens"),
    Key("rollout-temperature", "rollout.temperature", 1.0),
    Key("num-rollout", "trainer.steps"),
    Key("lr", "trainer.learning_rate", 1e-6),
    Key("lr-decay-style", "trainer.schedule", "linear"),
    Key("weight-decay", "trainer.weight_decay", 0.01),
    Key("adam-beta2", "trainer.beta2", 0.999),
    Key("clip-grad", "trainer.grad_clip", 1.0),
    Key("rollout-num-gpus-per-engine", "rollout.tensor_parallel", 1),
    # SGLang has two names for this flag.
    Key("sglang-ep-size", "rollout.expert_parallel"),
    Key("sglang-expert-parallel-size", "rollout.expert_parallel"),
    Key("update-weight-buffer-size", "weight_sync.bucket_bytes"),
    Key("tensor-model-parallel-size", "trainer.tensor_parallel"),
    Key("pipeline-model-parallel-size", "trainer.pipeline_parallel"),
    Key("context-parallel-size", "trainer.sequence_parallel"),
    Key("expert-model-parallel-size", "trainer.expert_parallel"),
    Key("save-interval", "trainer.checkpoint_every", 0),
    Key("eval-interval", "eval.every"),
    Key("n-samples-per-eval-prompt", "eval.samples", 1),
    Key("wandb-project", "tracking.project"),
    Key("seed", "seed", 1234),
    Key("eps-clip-c", "algorithm.loss_options.clip_dual"),
    Key("entropy-coef", "algorithm.entropy_coef", 0.0),
    Key("gamma", "algorithm.advantage_options.gamma", 1.0),
    Key("lambd", "algorithm.advantage_options.lam", 1.0),
)
_CRITIC = (
    ("learning_rate", "learning_rate", "lr"),
    ("schedule", "schedule", "lr-decay-style"),
    ("lr_warmup_steps", "warmup_steps", "lr-warmup-iters"),
    ("grad_clip", "grad_clip", "clip-grad"),
)
_RAY = "an option of Ray"
_MEGATRON = "a setting of Megatron that is fixed or absent here"
NO_COUNTERPART = {
    **dict.fromkeys(("head", "node-ip-address", "num-gpus", "disable-usage-stats", "dashboard-host"), _RAY),
    **dict.fromkeys(("dashboard-port", "address", "runtime-env-json", "force"), _RAY),
    **dict.fromkeys(("ref-load", "load", "save"), "checkpoints are in the run's folder, in Hugging Face's format"),
    "apply-chat-template": "prompts are rendered by the chat template",
    **dict.fromkeys(("metadata-key", "tool-key"), "templates of data.path name columns"),
    **dict.fromkeys(("balance-data", "use-dynamic-batch-size", "micro-batch-size"), "rows are always packed"),
    **dict.fromkeys(("recompute-granularity", "recompute-method", "recompute-num-layers"), _MEGATRON),
    **dict.fromkeys(("attention-backend", "sequence-parallel"), _MEGATRON),
    **dict.fromkeys(("accumulate-allreduce-grads-in-fp32", "attention-softmax-in-fp32"), _MEGATRON),
    "expert-tensor-parallel-size": _MEGATRON,
    "over-sampling-batch-size": "groups that are given up are replaced one by one (algorithm.shaping.dynamic_sampling)",
    **dict.fromkeys(
        ("optimizer-cpu-offload", "overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer"),
        "Megatron's optimizer stays on the devices",
    ),
    **dict.fromkeys(("moe-token-dispatcher-type", "moe-enable-deepep", "decoder-last-pipeline-num-layers"), _MEGATRON),
    **dict.fromkeys(
        ("update-weight-mode", "update-weight-transport", "update-weight-disk-dir", "update-weight-disk-keep-files"),
        "SGLang gets all weights, and over the network; with vLLM there are weight_sync.way=[disk,delta]",
    ),
    **dict.fromkeys(
        ("update-weight-local-checkpoint-dir", "update-weight-delta-encoding", "update-weight-delta-checksum"),
        "part of the delta's files",
    ),
    **dict.fromkeys(
        ("mtp-num-layers", "enable-mtp-training", "mtp-loss-scaling-factor"),
        "the heads for several tokens (MTP) are neither trained nor used",
    ),
    "sglang-*": "an engine's own setting; rollout.engine_args passes flags on",
    "rollout-stop-token-ids": "an answer ends with the model's own tokens of its generation config",
    "eval-config": "evaluation is data.eval_path and the section eval",
    **dict.fromkeys(("min-lr", "lr-decay-iters"), "a schedule falls to 0 over the whole run"),
    **dict.fromkeys(
        ("offload", "offload-train", "offload-rollout", "no-offload-train", "no-offload-rollout"),
        "colocated engines sleep while the trainer works",
    ),
    "use-routing-replay": "the engine's experts are replayed instead (trainer.router_replay)",
    **dict.fromkeys(
        ("eval-max-response-len", "eval-max-context-len", "eval-top-p", "eval-top-k"),
        "evaluation has the run's lengths, and samples from the whole distribution",
    ),
}
_PROGRAM = re.compile(r"(.*/)?train(_async)?\.py")


def write(file: Path, more: list[str]) -> str:
    """Our YAML for the flags in the script ``file``; ``more`` is further ``flag=value``."""
    found, assumed, program = script_flags(file, _PROGRAM)
    given, unresolved = resolve_references(overridden(found, more, "an argument"))
    t = Translation(given, notes=[*assumed, *unresolved])
    _missing(t)
    t.translate(KEYS)
    _weights(t)
    # Its engine is SGLang, whose refusal of truncation the text then tells.
    t.truncation("rollout-top-k", "rollout-top-p")
    t.only("adam-beta1", 0.9)
    t.put("trainer.backend", "megatron", "train-backend")
    t.take("train-backend")
    t.put("rollout.engine", "sglang", "sglang")
    high = t.take("eps-clip-high")
    low = t.take("eps-clip", 0.2)
    # A ratio is never below 0, so that every larger bound is none.
    t.put("algorithm.clip_low", min(low, 1.0), "eps-clip")
    t.put("algorithm.clip_high", low if high is None else high, "eps-clip-high", "eps-clip")
    _data(t)
    _devices(t)
    _lengths(t)
    _batch(t)
    _optimizer(t)
    _advantage(t)
    _kl(t)
    _correction(t)
    _evaluation(t)
    _rewards(t)
    trackers = [name for name in ("wandb", "tensorboard") if t.take(f"use-{name}")]
    t.put("tracking.backends", trackers, *(f"use-{name}" for name in trackers))
    if file_of_flags := t.take("custom-config-path"):
        t.notes.append(f"custom-config-path: {file_of_flags} changes flags there, and is not read")
    _weight_sync(t, late=program.endswith("train_async.py"))
    t.notes.append("flags of files that the script sources (the model's) are not read; the model's shape is its own")
    t.notes.append("environment variables that the script sets, also for Ray's jobs, are not read")
    engines = {flag: NO_COUNTERPART["sglang-*"] for flag in t.given if flag.startswith("sglang-")}
    return t.text(f"From {file} (slime).", engines | NO_COUNTERPART)


def _weight_sync(t: Translation, *, late: bool) -> None:
    """``train_async.py`` samples one step ahead and publishes every so many steps; ``train.py`` does neither."""
    every = t.number("update-weights-interval", 1)
    if late:
        t.put("weight_sync.every", every, "update-weights-interval")
        t.notes.append("queue.max_staleness: train_async.py samples one step ahead")
    else:
        t.notes.append("slime's train.py is synchronous; with queue.max_staleness=1 generation overlaps with training")
    t.put("queue.max_staleness", every if late else 0, "train_async.py")
    function = t.take("rollout-function-path", "slime.rollout.sglang_rollout.generate_rollout")
    if function.endswith("generate_rollout_fully_async"):
        t.notes.append(
            "queue.max_staleness: the fully asynchronous rollout has no bound there; raise it for more overlap"
        )
    elif function != "slime.rollout.sglang_rollout.generate_rollout":
        t.unknown.append(
            f"agent.loop: {function} makes the rollouts there; write what it does as a loop, or leave it out"
        )


def _weights(t: Translation) -> None:
    """Tell a checkpoint of the engines' alone, such as a quantised one, from the weights that are trained."""
    engines, trained = (str(t.given.get(flag, "")).rstrip("/") for flag in ("hf-checkpoint", "ref-load"))
    if engines and trained and Path(engines).name != Path(trained).name.removesuffix("_torch_dist"):
        t.notes.append(
            f"model.path: {engines} is what engines and tokenizer start from there, and training starts from "
            f"{trained}; here both are model.path, in a floating-point type"
        )


def _missing(t: Translation) -> None:
    """Name the abilities that this run would need and that do not exist here."""
    keys = t.take("multimodal-keys")
    if keys and re.sub(r"\s", "", str(keys)).replace("'", '"') != '{"image":"images"}':
        t.missing.append(f"videos, sound or another column (multimodal-keys={keys}); name the column of images images")
    if t.take("use-opd"):
        if (kind := t.take("opd-type")) == "megatron":
            # slime adds the teacher's term to the advantages of the rewards.
            t.put("algorithm.teacher.path", t.take("opd-teacher-load"), "opd-teacher-load")
            t.put("algorithm.teacher.coef", t.take("opd-kl-coef", 1.0), "opd-kl-coef")
            t.put("algorithm.teacher.rewards", True, "use-opd")
            t.notes.append("algorithm.teacher.path: a Hugging Face folder; slime's is a checkpoint of Megatron's")
        else:
            t.missing.append(f"a teacher behind SGLang (opd-type={kind}); algorithm.teacher.endpoint asks vLLM")
    if (loss := t.take("loss-type", "policy_loss")) == "sft_loss":
        t.missing.append("supervised fine-tuning (loss-type=sft_loss) by this command; it is `rl-async sft`")
    elif loss != "policy_loss":
        t.missing.append(f"the loss loss-type={loss}; write it as algorithm.loss=path.py:name")
    elif "sft_rollout" in str(t.given.get("rollout-function-path")):
        t.missing.append("supervised fine-tuning (rollout-function-path) by this command; it is `rl-async sft`")
    if t.take("debug-rollout-only") or t.take("debug-train-only"):
        t.missing.append("half of a run (debug-rollout-only, debug-train-only)")


def _data(t: Translation) -> None:
    """The data set and its columns, which are verl's here unless templates name others."""
    path, templates = t.take("prompt-data"), _templates(t.take("input-key", "input"), t.take("label-key"))
    if path is not None:
        t.put("data.path", [{"path": str(path)} | templates] if templates else path, "prompt-data")
    if t.take("label-key") is None:
        t.notes.append("data.path: without label-key answers are scored without a label there; here one is looked for")
    if "apply-chat-template" not in t.given:
        t.notes.append("data.path: without apply-chat-template prompts go as they are there; here they are rendered")


def _templates(prompt: str, label: str | None) -> dict[str, str]:
    """Templates of a source for the columns of prompt and answer that are not where they are looked for."""
    templates = {"prompt": f"{{{prompt}}}"} if prompt != "prompt" else {}
    # Rows in verl's columns have it inside of this one, which is where it is looked for.
    return templates | ({"ground_truth": f"{{{label}}}"} if label not in (None, "reward_model") else {})


def _devices(t: Translation) -> None:
    theirs = ("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus")
    ranks = t.number(theirs[0], 1) * t.number(theirs[1], 8)
    shared, each = t.take("colocate", False), t.ours.get("rollout.tensor_parallel", 1)
    t.put("trainer.ranks", ranks, *theirs[:2])
    engines = t.number(theirs[2], ranks)
    t.put("rollout.engines", max(engines // each, 1), *theirs)
    if shared:
        t.put("mode", "colocated", "colocate")


def _lengths(t: Translation) -> None:
    """An episode's limits: the context's, or a prompt and an answer; slime bounds a prompt by the context alone."""
    theirs = ("rollout-max-context-len", "rollout-max-prompt-len", "rollout-max-response-len")
    context = t.number(theirs[0], 0)
    prompt = t.number(theirs[1], context - 1 if context else our_default("data.max_prompt_tokens"))
    t.put("data.max_prompt_tokens", prompt, *theirs[:2])
    if not context and theirs[1] not in t.given:
        t.notes.append(f"data.max_prompt_tokens: without a limit there; a longer prompt than {prompt} is an error here")
    total = context or prompt + t.ours.get("rollout.max_tokens", our_default("rollout.max_tokens"))
    t.put("agent.max_tokens", total, *theirs)
    t.put("rollout.max_model_len", total, *theirs)


def _evaluation(t: Translation) -> None:
    """Evaluation samples as training does, unless told otherwise."""
    held_out = t.take("eval-prompt-data")
    # A file of data sets takes the place of the flag, and slime needs one of them with this interval.
    if t.given.get("eval-interval") and ("eval-config" in t.given or not held_out):
        held_out = f"{FILL_IN}.jsonl"
        t.unknown.append("data.eval_path: the data sets of eval-prompt-data or eval-config, which were not read")
    before = not t.take("skip-eval-before-train", False)
    heat = t.take("eval-temperature")
    heat = t.take("rollout-temperature", 1.0) if heat is None else heat
    # The best token alone is what a temperature of 0 takes.
    greedy = t.given.get("eval-top-k") == 1
    t.put("eval.temperature", 0 if greedy else heat, "eval-temperature", "eval-top-k")
    same = {"eval-top-p": (1,), "eval-top-k": (-1, 0, 1), "eval-max-response-len": (t.ours.get("rollout.max_tokens"),)}
    for flag, values in same.items():
        if t.given.get(flag) in values:
            t.take(flag)
    if not held_out:
        return
    if not t.given.get("eval-interval"):
        t.notes.append(f"eval-prompt-data={held_out}: without eval-interval slime does not evaluate")
        return
    # NAME FILE NAME FILE ...; a single word is a file.
    files = held_out[1::2] if isinstance(held_out, list) else [held_out]
    prompt, label = t.take("eval-input-key"), t.take("eval-label-key")
    templates = _templates(prompt or t.given.get("input-key", "input"), label or t.given.get("label-key"))
    sources = [{"path": str(file)} | templates for file in files]
    t.put("data.eval_path", sources if templates or len(sources) > 1 else sources[0]["path"], "eval-prompt-data")
    t.put("eval.before", before, "skip-eval-before-train")
    t.put("eval.tasks", EVERY_TASK, "eval-prompt-data")


# Rule-based rewards of slime (`slime/rollout/rm_hub`) that a scorer here gives.
REWARDS: dict[str, dict[str, Any]] = {
    "math": {"name": "math", "extract": ["boxed"]},
    "deepscaler": {"name": "math", "extract": ["boxed"]},
    "dapo": {"name": "math", "extract": ["regex:(?i)answer\\s*:\\s*([^\\n]+)"]},
}


def _rewards(t: Translation) -> None:
    """The reward, and the user's function that plays an episode, by the path that slime has for them."""
    custom, kind = t.take("custom-rm-path"), t.take("rm-type")
    if custom:
        function = {"name": _reference(custom)}
        t.notes.append(f"reward.functions: {custom} takes slime's samples there, and what scorers take here")
    elif kind is None or kind in REWARDS:
        function = REWARDS.get(str(kind), {"name": f"{FILL_IN}.py:score"})
        if kind == "deepscaler":
            t.notes.append("reward.functions: without a closed <think>, an answer is worth 0 there")
        if kind == "dapo":
            t.notes.append("reward.functions: a wrong answer is worth -1 there, 0 here; a group's advantages are equal")
    else:
        function = {"name": f"{FILL_IN}.py:{kind}"}
    if FILL_IN in function["name"]:
        t.unknown.append(f"reward.functions: the reward {kind or 'of the data'} of slime has no counterpart; write it")
    t.put("reward.functions", [function], "rm-type", "custom-rm-path")
    if generate := t.take("custom-generate-function-path"):
        t.put("agent.loop", _reference(generate), "custom-generate-function-path")
        t.notes.append(f"agent.loop: {generate} takes slime's arguments there; write it as a loop of this project's")
        if "rollout-max-context-len" not in t.given:
            t.notes.append("agent.max_tokens: bounds all turns of an episode; there, only each turn has a limit")


def _reference(path: str) -> str:
    module, _, name = str(path).rpartition(".")
    return f"{module}:{name}" if module else str(path)


def _batch(t: Translation) -> None:
    tasks, rows = t.number("rollout-batch-size", 0), t.number("global-batch-size", 0)
    group = t.number("n-samples-per-prompt", 1)
    # Ranks that share a row count their parts there, and the whole row here.
    if per_gpu := t.number("max-tokens-per-gpu", 0):
        tokens = per_gpu * t.number("context-parallel-size", 1)
        t.put("trainer.max_tokens_per_microbatch", tokens, "max-tokens-per-gpu")
    if tasks and rows:
        t.put("trainer.minibatches", max(tasks * group // rows, 1), "global-batch-size", "rollout-batch-size")
        if left := tasks * group % rows:
            t.notes.append(f"trainer.minibatches: {left} of {tasks * group} rows fill no global-batch-size={rows}")
    elif steps := t.take("num-steps-per-rollout"):
        t.put("trainer.minibatches", steps, "num-steps-per-rollout")
    else:
        t.unknown.append("trainer.minibatches: without global-batch-size a row per GPU is a mini-batch there")
    t.take("num-steps-per-rollout")
    epochs = t.take("num-epoch")
    for flag, key in (("rollout-max-response-len", "rollout.max_tokens"), ("num-rollout", "trainer.steps")):
        if key not in t.ours and not (epochs and key == "trainer.steps"):
            t.unknown.append(f"{key} ({our_default(key)} if left out): without {flag} slime has no bound")
    if epochs and "trainer.steps" not in t.ours:
        found = count_rows(t.given.get("prompt-data"))
        if found and tasks:
            t.put("trainer.steps", max(epochs * found // tasks, 1), "num-epoch")
        else:
            t.unknown.append(f"trainer.steps: num-epoch={epochs} are {epochs} * rows // {tasks} steps")
    if filters := t.take("dynamic-sampling-filter-path"):
        if str(filters).endswith("check_reward_nonzero_std"):
            t.put("algorithm.shaping.dynamic_sampling", True, "dynamic-sampling-filter-path")
        else:
            t.notes.append(f"dynamic-sampling-filter-path={filters} has no counterpart")


def _optimizer(t: Translation) -> None:
    """What Megatron's own defaults and its schedule say; its iterations are optimizer steps."""
    if (name := t.take("optimizer", "adam")) != "adam":
        t.notes.append(f"optimizer={name}: the optimizer here is AdamW, with another best learning rate")
    if dropout := [flag for flag in ("attention-dropout", "hidden-dropout") if t.take(flag, 0.1)]:
        t.notes.append(f"{' and '.join(dropout)}: Megatron drops 0.1 unless told 0; a model here drops nothing")
    share, total = t.take("lr-warmup-fraction"), t.ours.get("trainer.steps")
    if share is not None and total is None:
        t.unknown.append(f"trainer.warmup_steps: lr-warmup-fraction={share} of all optimizer steps")
    elif share is not None:
        steps = int(share * t.given.get("lr-decay-iters", total * t.ours.get("trainer.minibatches", 1)))
        t.put("trainer.warmup_steps", steps, "lr-warmup-fraction")
    else:
        t.put("trainer.warmup_steps", t.number("lr-warmup-iters", 0), "lr-warmup-iters")


def _advantage(t: Translation) -> None:
    """slime's estimator names loss and advantage at once; a row counts once unless told otherwise."""
    name = str(t.take("advantage-estimator", "grpo")).replace("-", "_")
    no_deviation = t.take("disable-grpo-std-normalization", False)
    group = {"ppo": "gae", "gspo": "grpo", "cispo": "grpo"}.get(name, name)
    whitened = t.take("normalize-advantages", False)
    advantage = "dr_grpo" if no_deviation and group == "grpo" else group
    custom, processed = t.take("custom-advantage-function-path"), t.take("custom-reward-post-process-path")
    if custom:
        advantage = _reference(custom)
        t.notes.append(f"algorithm.advantage: {custom} takes slime's batch there, and AdvantageInputs here")
    elif processed and group == "grpo":
        advantage = _reference(processed)
        t.notes.append(f"algorithm.advantage: {processed} makes rewards of samples there; here, of AdvantageInputs")
    elif processed:
        t.unknown.append(f"reward.functions: {processed} changes a batch's rewards there; write it into the rewards")
    elif t.take("disable-rewards-normalization", False) and group in ("grpo", "reinforce_plus_plus_baseline"):
        advantage = f"{FILL_IN}.py:rewards"
        t.unknown.append("algorithm.advantage: without normalization rewards lack the group's baseline there; write it")
    t.put("algorithm.advantage", advantage, "advantage-estimator")
    t.put("algorithm.loss", name if name in ("gspo", "cispo") else "ppo", "advantage-estimator")
    if group == "gae":
        t.put("critic.clip", t.take("value-clip", 0.2), "value-clip")
        t.put("critic.warmup_steps", t.take("num-critic-only-steps", 0), "num-critic-only-steps")
        # A critic has the policy's optimizer and schedule there, unless a file of Megatron's roles says otherwise.
        for key, same, flag in _CRITIC:
            t.put(f"critic.{key}", t.ours.get(f"trainer.{same}", our_default(f"trainer.{same}")), flag)
        t.put("algorithm.advantage_options.whiten", whitened, "normalize-advantages")
    elif group == "grpo" and whitened:
        t.unknown.append("algorithm.advantage: normalize-advantages whitens the group's advantages there; write it")
    if t.take("use-opsm", False):
        t.put("algorithm.off_policy_mask", t.take("opsm-delta", 1e-4), "use-opsm")
    if t.take("use-rollout-routing-replay", False):
        t.put("trainer.router_replay", "always", "use-rollout-routing-replay")
    per_token = t.take("calculate-per-token-loss", False)
    aggregation = "token-mean" if per_token else "seq-mean-token-mean"
    t.put("algorithm.aggregation", aggregation, "calculate-per-token-loss")


def _kl(t: Translation) -> None:
    estimator, unbiased = t.take("kl-loss-type", "k1"), t.take("use-unbiased-kl", False)
    coef, in_reward = t.take("kl-loss-coef", 0.0), t.take("kl-coef", 0.0)
    if t.take("use-kl-loss", False):
        t.put("algorithm.kl.coef", coef, "kl-loss-coef")
        t.put("algorithm.kl.estimator", ESTIMATORS.get(estimator, estimator), "kl-loss-type")
        t.put("algorithm.kl.unbiased", unbiased, "use-unbiased-kl")
    elif in_reward and t.ours["algorithm.advantage"] in ("grpo", "dr_grpo"):
        t.notes.append(f"kl-coef={in_reward}: grpo, gspo and cispo do not read it there, nor does this run")
    elif in_reward:
        t.put("algorithm.kl.coef", in_reward, "kl-coef")
        t.put("algorithm.kl.estimator", ESTIMATORS.get(estimator, estimator), "kl-loss-type")
        t.put("algorithm.kl.place", "reward", "kl-coef")


def _correction(t: Translation) -> None:
    low, cap = t.take("tis-clip-low", 0), t.take("tis-clip", 2.0)
    if custom := t.take("custom-tis-function-path"):
        t.unknown.append(f"algorithm.correction: {custom} corrects there; choose the nearest, or write it")
    if t.take("use-rollout-logprobs", False):
        t.put("algorithm.correction", "bypass_ppo_clip", "use-rollout-logprobs")
    elif t.take("use-tis", False):
        t.put("algorithm.correction", "slime_tis", "use-tis")
        t.put("algorithm.correction_options.cap", cap, "tis-clip") if cap != 2.0 else None
        if low:
            t.notes.append(f"tis-clip-low={low}: a weight has no lower bound here")
    else:
        t.put("algorithm.correction", "disabled", "use-tis")
