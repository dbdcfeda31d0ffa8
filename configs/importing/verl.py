"""verl's PPO trainer (`verl/trainer/config/ppo_trainer.yaml` and the files in it), as of version 0.9.1.

Its `algorithm.rollout_correction` becomes one of our presets, or a preset and its changes.
"""

import re
from pathlib import Path
from typing import Any

import msgspec

from rl_async.configs.importing.translation import (
    EVERY_TASK,
    FILL_IN,
    STRUCTURED,
    Key,
    Translation,
    Values,
    count_rows,
    data_sources,
    our_default,
    overridden,
    read_settings,
    resolve_references,
)
from rl_async.configs.schema.algorithm import PRESETS, CorrectionOptions, resolve
from rl_async.configs.schema.data import RopeConfig
from rl_async.configs.suggestions import ADVANTAGES, ESTIMATORS, LOSSES
from rl_async.errors import ConfigError

SECTION = "algorithm.rollout_correction"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
# A k1 band equals its inverse if their lower ends differ by less.
SAME = 1e-5


def put(t: Translation) -> None:
    """Choose the preset that corrects as verl does; say what cannot be had."""
    weight, threshold = t.take(f"{SECTION}.rollout_is"), t.take(f"{SECTION}.rollout_is_threshold", 2.0)
    if weight not in (None, "token", "sequence"):
        raise ConfigError(f"{SECTION}.rollout_is: {weight!r}; verl knows token and sequence")
    rules, limits = t.take(f"{SECTION}.rollout_rs"), t.take(f"{SECTION}.rollout_rs_threshold")
    normalises, loss = t.take(f"{SECTION}.rollout_is_batch_normalize"), t.take(f"{SECTION}.loss_type", "ppo_clip")
    bypass = t.take(f"{SECTION}.bypass_mode", False) or t.take(LOSS_MODE) == "bypass_mode"
    base = ("bypass_ppo_clip" if loss == "ppo_clip" else "bypass_pg_is") if bypass else "disabled"
    if bypass and loss == "ppo_clip" and weight:
        t.notes.append("bypass with ppo_clip: verl computes weights and does not use them; they are left out")
        weight = None
    options: dict[str, Any] = {"weight": weight or "none"}
    if weight:
        options |= {"band": threshold} if "_" in str(threshold) else {"cap": _number(threshold)}
        if normalises and bypass:
            t.notes.append(f"{SECTION}.rollout_is_batch_normalize with bypass_mode has no counterpart")
        elif normalises:
            options["normalise"] = True
    if rules:
        options["reject"] = _rejections(t, str(rules), limits)
    wanted = resolve(base, msgspec.convert(options, CorrectionOptions))
    preset = next((name for name, known in PRESETS.items() if known == wanted), None)
    given = [key for key in t.given if key.startswith(f"{SECTION}.")] or [f"{SECTION}.rollout_is"]
    t.put("algorithm.correction", preset or base, *given)
    if preset is None:
        for name, value in options.items():
            t.put(f"algorithm.correction_options.{name}", value, *given)


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{SECTION}: {text!r} is no threshold; verl has a number or low_high") from None


def _rejections(t: Translation, rules: str, limits: Any) -> dict[str, Any]:
    """Rules and their limits; verl tests -log r against a k1 band, so that it keeps r in [1 / high, 1 / low]."""
    names = [name.strip() for name in rules.split(",") if name.strip()]
    texts = [text.strip() for text in str(limits).split(",") if text.strip()]
    texts = texts * len(names) if len(texts) == 1 else texts
    found: dict[str, Any] = {}
    for name, text in zip(names, texts, strict=False):
        if "_" not in text:
            found[name] = _number(text)
            continue
        low, high = (_number(bound) for bound in text.split("_", 1))
        if abs(1 / high - low) < SAME:
            found[name] = text
        else:
            found[name] = f"{1 / high:.6g}_{1 / low:.6g}"
            t.notes.append(f"{name}: verl keeps r in [1/high, 1/low] of {text}, which is {found[name]} here")
    return found


ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TRACKERS = ("console", "tensorboard", "swanlab", "wandb", "mlflow")


# Strategies that shard as FSDP2 does, or that drive Megatron-Core.
BACKENDS = {
    **dict.fromkeys(("fsdp", "fsdp_turbo", "veomni", "torchtitan", "automodel"), "fsdp2"),
    "megatron_lite": "megatron",
}


def _or_off(value: int) -> int:
    # There -1 turns it off, and here 0.
    return max(value, 0)


KEYS = (
    Key(f"{MODEL}.path", "model.path"),
    Key("data.train_batch_size", "data.train_batch_groups", 1024),
    Key("data.max_prompt_length", "data.max_prompt_tokens", 512),
    Key("data.shuffle", "data.shuffle", True),
    Key(f"{ROLLOUT}.name", "rollout.engine", skip=(None, "???")),
    Key(f"{ROLLOUT}.val_kwargs.n", "eval.samples", 1),
    Key(f"{ROLLOUT}.n", "rollout.group_size", 1),
    Key(f"{ROLLOUT}.temperature", "rollout.temperature", 1.0),
    Key(f"{ROLLOUT}.max_num_seqs", "rollout.max_batch_size", 256),
    Key("data.max_response_length", "rollout.max_tokens", 512),
    Key(f"{ROLLOUT}.agent.num_workers", "agent.workers"),
    Key(f"{ACTOR}.optim.lr", "trainer.learning_rate", 1e-6),
    Key(f"{ACTOR}.optim.weight_decay", "trainer.weight_decay", 0.01),
    Key(f"{ACTOR}.optim.lr_scheduler_type", "trainer.schedule", "constant"),
    Key(f"{ACTOR}.grad_clip", "trainer.grad_clip", 1.0),
    Key(f"{ACTOR}.ppo_epochs", "trainer.epochs", 1),
    Key(f"{ACTOR}.strategy", "trainer.backend", "fsdp", lambda name: BACKENDS.get(name, name)),
    Key(f"{ACTOR}.fsdp_config.offload_policy", "trainer.cpu_offload"),
    Key(f"{MODEL}.enable_gradient_checkpointing", "trainer.activation_checkpointing", True),
    Key("trainer.total_training_steps", "trainer.steps"),
    Key("trainer.save_freq", "trainer.checkpoint_every", -1, _or_off),
    Key("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    Key("trainer.test_freq", "eval.every", -1, _or_off),
    Key("trainer.project_name", "tracking.project"),
    Key("algorithm.gamma", "algorithm.advantage_options.gamma", 1.0),
    Key("algorithm.lam", "algorithm.advantage_options.lam", 1.0),
    Key(f"{ACTOR}.clip_ratio_c", "algorithm.loss_options.clip_dual", 3.0),
    Key(f"{ACTOR}.tau_pos", "algorithm.loss_options.sapo_tau_positive", 1.0),
    Key(f"{ACTOR}.tau_neg", "algorithm.loss_options.sapo_tau_negative", 1.05),
    Key(f"{ACTOR}.policy_loss.clip_cov_ratio", "algorithm.loss_options.clip_cov_share", 2e-4),
    Key(f"{ACTOR}.policy_loss.clip_cov_lb", "algorithm.loss_options.clip_cov_low", 1.0),
    Key(f"{ACTOR}.policy_loss.clip_cov_ub", "algorithm.loss_options.clip_cov_high", 5.0),
    Key(f"{ACTOR}.policy_loss.kl_cov_ratio", "algorithm.loss_options.kl_cov_share", 2e-4),
    Key(f"{ACTOR}.policy_loss.ppo_kl_coef", "algorithm.loss_options.kl_cov_coef", 0.1),
    Key(f"{ACTOR}.policy_loss.dro_beta", "algorithm.loss_options.dro_beta"),
    Key(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", 0),
    Key("algorithm.filter_groups.enable", "algorithm.shaping.dynamic_sampling", False),
    Key(f"{ROLLOUT}.multi_turn.max_assistant_turns", "agent.max_turns"),
    Key(f"{ROLLOUT}.multi_turn.max_tool_response_length", "agent.tool_response_tokens"),
    Key(f"{ROLLOUT}.multi_turn.max_parallel_calls", "agent.max_parallel_calls"),
)
# These are read if the config names an engine. Otherwise verl's defaults hold, and those only suit its usual machines.
ENGINE_KEYS = (
    Key(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel", 2),
    Key(f"{ROLLOUT}.pipeline_model_parallel_size", "rollout.pipeline_parallel"),
)
# Of its other trainers and earlier versions; without a default, so that they say something where they are given.
OTHER_KEYS = (
    Key(f"{ACTOR}.optim.clip_grad", "trainer.grad_clip"),
    Key(f"{ACTOR}.optim.lr_decay_style", "trainer.schedule"),
    Key(f"{ACTOR}.optim.warmup_style", "trainer.schedule"),
    Key(f"{ACTOR}.policy_loss.tau_pos", "algorithm.loss_options.sapo_tau_positive"),
    Key(f"{ACTOR}.policy_loss.tau_neg", "algorithm.loss_options.sapo_tau_negative"),
)
MEGATRON_KEYS = (
    Key(f"{ACTOR}.megatron.tensor_model_parallel_size", "trainer.tensor_parallel", 1),
    Key(f"{ACTOR}.megatron.pipeline_model_parallel_size", "trainer.pipeline_parallel", 1),
    Key(f"{ACTOR}.megatron.context_parallel_size", "trainer.sequence_parallel", 1),
    Key(f"{ACTOR}.megatron.expert_model_parallel_size", "trainer.expert_parallel", 1),
    # Of megatron_lite.
    Key(f"{ACTOR}.engine.tp", "trainer.tensor_parallel"),
    Key(f"{ACTOR}.engine.pp", "trainer.pipeline_parallel"),
    Key(f"{ACTOR}.engine.cp", "trainer.sequence_parallel"),
    Key(f"{ACTOR}.engine.ep", "trainer.expert_parallel"),
)
CRITIC_KEYS = (
    Key("critic.model.path", "critic.path"),
    Key("critic.optim.lr", "critic.learning_rate", 1e-5),
    Key("critic.cliprange_value", "critic.clip", 0.5),
    Key("critic.grad_clip", "critic.grad_clip", 1.0),
    Key("trainer.critic_warmup", "critic.warmup_steps", 0),
)

_ENGINE = "an engine's own setting; rollout.engine_args passes flags on"
NO_COUNTERPART = {
    "trainer.experiment_name": "give it to `rl-async launch` as --name",
    "trainer": "not read",
    "algorithm.filter_groups": "a number as algorithm.shaping.dynamic_sampling bounds refills",
    f"{ACTOR}.policy_loss": "a number of a loss that is not used, or unknown here",
    f"{ACTOR}.loss_scale_factor": "only loss_agg_mode=seq-mean-token-sum-norm reads it",
    f"{ACTOR}.ppo_micro_batch_size": "micro-batches are packed to trainer.max_tokens_per_microbatch",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "micro-batches are packed to trainer.max_tokens_per_microbatch",
    f"{ACTOR}.use_dynamic_bsz": "micro-batches are always packed by tokens",
    f"{ACTOR}.fsdp_config": "FSDP2 has trainer.cpu_offload, trainer.replicas and model.dtype",
    f"{ACTOR}.megatron": "settings of Megatron that are fixed or absent here",
    ACTOR: "not read",
    "actor_rollout_ref.ref": "the reference model runs with the trainer's settings",
    f"{MODEL}.use_remove_padding": "rows are always packed",
    f"{MODEL}.mtp": "the heads for several tokens (MTP) are neither trained nor used",
    f"{ACTOR}.optim.min_lr": "a schedule falls to 0",
    "trainer.device": "there are GPUs and CPUs, by model.device",
    "data.train_max_samples": "a run takes all tasks of data.path",
    "data.custom_cls": "rows of other columns have templates in data.path",
    "data.sampler": "the order of tasks is data.shuffle, and queue.sampling",
    "data.gen_batch_size": "groups that are given up are replaced one by one",
    "reward.reward_manager": "rewards are reward.functions",
    "async_training": "staleness is bounded by queue.max_staleness",
    "rollout": "engines are rollout.engines",
    f"{MODEL}.override_config.max_position_embeddings": "the model's own config.json bounds rollout.max_model_len",
    MODEL: "not read",
    f"{ROLLOUT}.multi_turn": "tools are agent.tools; lengths are in tokens, agent.tool_response_tokens",
    **dict.fromkeys((key.theirs for key in ENGINE_KEYS), "no engine is named; several ranks need vllm or sglang"),
    f"{ROLLOUT}.expert_parallel_size": "no engine is named; several ranks need vllm or sglang",
    f"{ROLLOUT}.data_parallel_size": "copies of the model are rollout.engines",
    f"{ROLLOUT}.gpu_memory_utilization": "the size of an engine's KV cache is rollout.cache_bytes, in bytes",
    f"{ROLLOUT}.enforce_eager": _ENGINE,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "passes are packed to trainer.max_tokens_per_microbatch",
    f"{ROLLOUT}.val_kwargs": "evaluation has eval.temperature and eval.samples, and the truncation of training",
    ROLLOUT: _ENGINE,
    "actor_rollout_ref": "not read",
    "critic": "a critic belongs to algorithm.advantage=gae, and has fewer settings of its own",
    "data.filter_overlong_prompts": "a prompt longer than data.max_prompt_tokens is an error here: filter the data",
    "trainer.critic_warmup": "a critic belongs to algorithm.advantage=gae",
    "data.apply_chat_template_kwargs": "prompts are rendered by the template's own defaults",
    "data.truncation": "a prompt longer than data.max_prompt_tokens is an error here",
    "data": "not read",
    "reward": "rewards are reward.functions",
    "reward_model": "rewards are reward.functions, reward.model and reward.judge",
    "distillation": "the teacher is loaded beside the policy (algorithm.teacher)",
    **dict.fromkeys(("transfer_queue", "global_profiler", "skip", "ray_kwargs", "hydra", "defaults"), "verl's own"),
    "sandbox_fusion": "tools and scorers bring their own",
}


def write(file: Path, more: list[str]) -> str:
    """Our YAML for the settings in ``file`` and the ``a.b=c`` in ``more``."""
    settings, assumed = read_settings(file)
    changes = overridden({}, more, "an argument")
    given, unresolved = resolve_references(overridden(settings, more, "an argument"))
    t = Translation({key: value for key, value in given.items() if not key.endswith("_target_")})
    t.notes += [*assumed, *unresolved]
    base = str(t.take("--config-name", "ppo_trainer")).removesuffix(".yaml")
    if base != "ppo_trainer":
        t.notes.append(f"--config-name={base}: the values of that file are not read; give those that matter as a.b=c")
    # What chooses the trainer: a group of Hydra's, and a key and a whole file of earlier versions.
    engine = t.take("model_engine") or t.take(f"{ACTOR}.model_engine") or ("megatron" if "megatron" in base else None)
    if engine:
        t.given.setdefault(f"{ACTOR}.strategy", engine)
    _missing(t, changes if file.suffix in STRUCTURED else given)
    # Megatron recomputes activations by settings of its own.
    if BACKENDS.get(t.given.get(f"{ACTOR}.strategy", ""), t.given.get(f"{ACTOR}.strategy")) == "megatron":
        t.given[f"{MODEL}.enable_gradient_checkpointing"] = False
    t.translate(KEYS + OTHER_KEYS)
    t.truncation(f"{ROLLOUT}.top_k", f"{ROLLOUT}.top_p")
    if t.ours.get("trainer.backend") == "megatron":
        t.translate(MEGATRON_KEYS)
        chunks, key = f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size", "trainer.virtual_pipeline"
        if t.ours.get("trainer.pipeline_parallel", 1) > 2:
            t.translate([Key(chunks, key)])
        elif t.take(chunks) is not None:
            t.notes.append(f"{chunks}={t.given[chunks]}: {key} needs three stages or more; left out, results are equal")
    if t.take(f"{ROLLOUT}.name") not in (None, "???"):
        t.translate(ENGINE_KEYS)
    mode = t.take("trainer.v1.trainer_mode", "sync")
    if t.given.get("async_training") or any(key.startswith("async_training.") for key in t.given):
        mode = "separate_async"
    _devices(t, mode)
    _override(t)
    _data(t)
    _sizes(t)
    _steps(t)
    _optimizer(t)
    _advantage(t)
    _loss(t)
    _kl(t)
    _shaping(t)
    put(t)
    _rewards(t)
    t.put("queue.max_staleness", 0 if mode == "sync" else 1, "trainer.v1.trainer_mode")
    t.notes.append(f"queue.max_staleness: the trainer there is {mode}; from 1 on generation overlaps with training")
    t.notes.append("epsilon beside a standard deviation: 1e-6 there, 1e-4 here, fixed")
    return t.text(f"From {file} (verl, read by the keys of version 0.9.1).", NO_COUNTERPART)


# verl's whole YAMLs have these at their defaults, so that only a script or an argument that sets them says anything.
_MEDIA = ("data.video_key", "data.audio_key", "data.mm_files")
# Sections at the top of the configs of verl's SFT trainer and of its generation.
_OTHER_TRAINERS = ("model", "optim", "engine", "rollout")


def _missing(t: Translation, chosen: Values) -> None:
    """Name the abilities that this run would need and that do not exist here."""
    others = [key for key in t.given if key.partition(".")[0] in _OTHER_TRAINERS]
    if others and not any(key.startswith("actor_rollout_ref.") for key in t.given):
        t.missing.append(f"a run of verl's SFT or generation ({others[0]}); see `rl-async sft` and `rl-async eval`")
    media = [f"{key}={chosen[key]}" for key in _MEDIA if chosen.get(key) is not None]
    for key in _MEDIA:
        t.take(key)
    if media:
        t.missing.append(f"prompts with videos or sound ({', '.join(media)}); models read text and images")
    if (column := t.take("data.image_key", "images")) != "images":
        t.missing.append(f"images in another column (data.image_key={column}); name the column images")
    if t.take("actor_rollout_ref.actor.freeze_vision_tower"):
        t.put("trainer.vision_learning_rate", 0.0, "actor_rollout_ref.actor.freeze_vision_tower")
    if t.take("distillation.enabled"):
        _distillation(t)
    if t.given.get(f"{ROLLOUT}.name") not in (None, "???", "vllm", "sglang"):
        t.missing.append(f"the engine {ROLLOUT}.name={t.given[f'{ROLLOUT}.name']}; there are vllm and sglang")
    # PRIME's reward model is no model of rewards for whole answers.
    prime = any(key.startswith("reward_model.model.") and key.endswith((".update", ".beta_train")) for key in t.given)
    enabled = [t.take(f"{section}.enable", False) for section in ("reward.reward_model", "reward_model")]
    paths = [t.take(key) for key in ("reward.reward_model.model_path", "reward_model.model.path")]
    if any(enabled) and not prime:
        path = next((path for path, on in zip(paths, enabled, strict=True) if on and path), None)
        t.notes.append(f"reward.model.path: the reward model {path} must be a sequence classifier with one label")
        t.put("reward.functions", [{"name": "reward_model"}], "reward.reward_model.enable", "reward_model.enable")
        t.put("reward.model.path", path, "reward.reward_model.model_path", "reward_model.model.path")


def _override(t: Translation) -> None:
    """Translate changes to the model's config; others than these are left to the report."""
    prefix, rope = f"{MODEL}.override_config", "model.override.rope"
    t.translate([Key(f"{prefix}.attn_implementation", "model.override.attention")])
    scaling = f"{prefix}.rope_scaling"
    # Earlier versions of Transformers call the kind "type".
    t.translate([Key(f"{scaling}.type", f"{rope}.rope_type")])
    for form in (prefix, scaling, f"{prefix}.rope_parameters"):
        t.translate([Key(f"{form}.{name}", f"{rope}.{name}") for name in RopeConfig.__struct_fields__])


def _distillation(t: Translation) -> None:
    """Translate a teacher: its model, how it is compared with the policy, and whether rewards teach, too."""
    models = [key for key in t.given if re.fullmatch(r"distillation\.teacher_models\.\w+\.model_path", key)]
    paths = {key.removesuffix(".model_path"): t.take(key) for key in models}
    # verl chooses by this column of a row.
    column = t.take("distillation.teacher_key", "data_source")
    if not paths or (len(paths) > 1 and column != "data_source"):
        t.missing.append(
            f"{len(paths) or 'no'} teachers (distillation.teacher_models) by the column {column}; by data_source there "
            "may be several"
        )
        return
    loss = "distillation.distillation_loss"
    kind, by_gradient = t.take(f"{loss}.loss_mode", "k3"), not t.take(f"{loss}.use_policy_gradient", False)
    if kind == "k1" and not by_gradient:
        divergence = "sampled"
        t.notes.append(f"algorithm.teacher.divergence: sampled tokens count up to 20, not {loss}.loss_max_clamp")
    elif kind == "forward_kl_topk" and by_gradient:
        divergence = "forward"
        t.put("algorithm.teacher.top_k", t.take(f"{loss}.topk", 128), f"{loss}.topk")
        t.notes.append("algorithm.teacher.top_k: the other tokens count, too, as one")
    else:
        t.missing.append(
            f"{loss}.loss_mode={kind} with use_policy_gradient={not by_gradient}; there are k1 with it, and "
            "forward_kl_topk without"
        )
        return
    for key in ("loss_max_clamp", "log_prob_min_clamp", "topk"):
        t.take(f"{loss}.{key}")
    if len(paths) == 1:
        t.put("algorithm.teacher.path", next(iter(paths.values())), *models)
    else:
        named = {t.take(f"{name}.key", name.rpartition(".")[2]): {"path": path} for name, path in paths.items()}
        t.put("algorithm.teacher.by_source", named, *models)
    t.put("algorithm.teacher.divergence", divergence, f"{loss}.loss_mode")
    rewards = t.take(f"{loss}.use_task_rewards", True)
    t.put("algorithm.teacher.rewards", rewards, f"{loss}.use_task_rewards")
    if rewards:
        t.put("algorithm.teacher.coef", t.take(f"{loss}.distillation_loss_coef", 1.0), f"{loss}.distillation_loss_coef")
    t.notes.append("algorithm.teacher.path: the teacher is loaded beside the policy, not by engines of its own")


def _devices(t: Translation, mode: str) -> None:
    """Ranks and engines from nodes and GPUs: they share all devices there unless the trainer is separate."""
    nodes, gpus = t.number("trainer.nnodes", 1), t.number("trainer.n_gpus_per_node", 8)
    theirs = ("trainer.nnodes", "trainer.n_gpus_per_node")
    ranks = nodes * gpus
    each = t.ours.get("rollout.tensor_parallel", 1) * t.ours.get("rollout.pipeline_parallel", 1)
    own = t.number(f"{ROLLOUT}.nnodes", 0) * t.number(f"{ROLLOUT}.n_gpus_per_node", gpus)
    own = own or t.number("rollout.nnodes", 0) * t.number("rollout.n_gpus_per_node", gpus)
    if mode != "separate_async":
        own = 0
    if any(key in t.given for key in theirs):
        t.put("trainer.ranks", ranks, *theirs)
        t.put("rollout.engines", max((own or ranks) // each, 1), *theirs)
        if not own:
            t.put("mode", "colocated", *theirs)
    else:
        t.unknown.append("trainer.ranks, rollout.engines and mode: from trainer.nnodes and trainer.n_gpus_per_node")
    experts = t.number(f"{ROLLOUT}.expert_parallel_size", 1)
    if experts > 1 and "rollout.engine" in t.ours:
        parallel = t.ours.get("rollout.tensor_parallel", 1)
        t.put("rollout.expert_parallel", parallel, f"{ROLLOUT}.expert_parallel_size")
        if experts != parallel:
            t.notes.append(
                f"rollout.expert_parallel: experts are dealt to {experts} GPUs there, across copies of the model; an "
                f"engine here has all of them on its rollout.tensor_parallel={parallel} ranks, which must have room"
            )
    if t.ours.get("trainer.cpu_offload"):
        t.put("model.device", "gpu", f"{ACTOR}.fsdp_config.offload_policy")


def _data(t: Translation) -> None:
    files = t.take("data.train_files")
    if files is not None:
        several = isinstance(files, list) and len(files) > 1
        only = files[0] if isinstance(files, list) and files else files
        rows = [count_rows(file) for file in files] if several else []
        weights = [{"weight": float(count)} if count else {} for count in rows]
        sources = [{"path": file} | weight for file, weight in zip(files, weights, strict=True)] if several else []
        t.put("data.path", sources or only, "data.train_files")
        if None in rows:
            t.unknown.append("data.path: verl draws from all rows alike; give each file its number of rows as weight")
    held_out = t.take("data.val_files")
    if held_out:
        several = isinstance(held_out, list) and len(held_out) > 1
        only = held_out[0] if isinstance(held_out, list) else held_out
        t.put("data.eval_path", [{"path": file} for file in held_out] if several else only, "data.val_files")
    before = t.take("trainer.val_before_train", True)
    sampling = f"{ROLLOUT}.val_kwargs"
    heat = t.take(f"{sampling}.temperature", 0)
    # Agent loops sample by the temperature alone.
    if not t.take(f"{sampling}.do_sample", False) and t.take(f"{ROLLOUT}.mode", "async") == "sync":
        heat = 0
    if held_out:
        t.put("eval.before", before, "trainer.val_before_train")
        t.put("eval.temperature", heat, f"{sampling}.do_sample", f"{sampling}.temperature")
        most = t.number("data.val_max_samples", -1)
        t.put("eval.tasks", most if most > 0 else EVERY_TASK, "data.val_max_samples")


def _sizes(t: Translation) -> None:
    """Translate lengths and mini-batches: verl gives parts where our keys give wholes, or the reverse."""
    mini = t.number(f"{ACTOR}.ppo_mini_batch_size", 256)
    tasks = t.number("data.train_batch_size", 1024)
    # The fully asynchronous trainer has 0 there, and trains as soon as these mini-batches have been sampled.
    require = t.number("async_training.require_batches", 1)
    if not tasks:
        tasks = mini * require
        t.put("data.train_batch_groups", tasks, "data.train_batch_size")
    if total := t.number("rollout.total_rollout_steps", 0):
        t.put("trainer.steps", max(total // tasks, 1), "rollout.total_rollout_steps")
    if tasks % mini:
        t.notes.append(f"data.train_batch_size={tasks} is no multiple of ppo_mini_batch_size={mini}; rounded down")
    t.put("trainer.minibatches", max(tasks // mini, 1), "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    per_gpu = f"{ACTOR}.ppo_max_token_len_per_gpu"
    # The names of its versions and backends.
    ranks = [f"{ACTOR}.{key}ulysses_sequence_parallel_size" for key in ("", "fsdp_config.")]
    ranks += [f"{ACTOR}.{key}.ulysses_parallel_size" for key in ("veomni", "fsdp_config.turbo_config.distributed")]
    if t.ours.get("trainer.backend") == "megatron":
        sharing = t.ours.get("trainer.sequence_parallel", 1)
    else:
        sharing = max(t.number(key, 1) for key in ranks)
        t.put("trainer.sequence_parallel", sharing, *ranks)
    # Ranks that share a row count their parts there, and the whole row here.
    tokens = t.number(per_gpu, 16384) * sharing
    t.put("trainer.max_tokens_per_microbatch", tokens, per_gpu, *ranks)
    lengths = ("data.max_prompt_length", "data.max_response_length")
    total = t.number(lengths[0], 512) + t.number(lengths[1], 512)
    t.put("agent.max_tokens", total, *lengths)
    longest = max(t.number(f"{ROLLOUT}.max_model_len", total) if t.take(f"{ROLLOUT}.max_model_len") else total, total)
    t.put("rollout.max_model_len", longest, *lengths, f"{ROLLOUT}.max_model_len")
    if t.take(f"{ROLLOUT}.multi_turn.enable", False):
        t.put("agent.loop", "tool_agent", f"{ROLLOUT}.multi_turn.enable")
        # Turns end with the tokens there, unless their number is given.
        if "agent.max_turns" not in t.ours:
            t.put("agent.max_turns", t.number(lengths[1], 512), f"{ROLLOUT}.multi_turn.enable")
    listed = [f"{ROLLOUT}.multi_turn.{kind}_config_path" for kind in ("tool", "interaction")]
    if files := [file for key in listed if (file := t.take(key))]:
        t.put("agent.environment", f"verl:{','.join(files)}", *listed)
        t.notes.append(
            "agent.environment: rewards get the scores of tools and interactions there; add {name: environment} to "
            "reward.functions"
        )


def _steps(t: Translation) -> None:
    """Count the steps of ``total_epochs``, which end verl's training unless the config has a number of steps."""
    epochs = t.number("trainer.total_epochs", 30)
    if "trainer.steps" in t.ours:
        return
    files = t.take("data.train_files")
    rows = [count_rows(file) for file in (files if isinstance(files, list) else [files])]
    tasks = t.ours.get("data.train_batch_groups", our_default("data.train_batch_groups"))
    if rows and None not in rows:
        total = sum(row for row in rows if row is not None)
        t.put("trainer.steps", max(epochs * (total // tasks), 1), "trainer.total_epochs")
        return
    t.unknown.append(
        f"trainer.steps ({our_default('trainer.steps')} if left out): total_epochs={epochs} are {epochs} * (rows // "
        f"{tasks}) steps; with data.train_files=FILE behind this command, of files that are here, it counts them"
    )


def _optimizer(t: Translation) -> None:
    key = f"{ACTOR}.optim.betas"
    match t.take(key, [0.9, 0.999]):
        case [0.9, beta2]:
            t.put("trainer.beta2", beta2, key)
        case betas:
            t.missing.append(f"{key}={betas}; here they are 0.9 and trainer.beta2")
    _warmup(t, ACTOR, "trainer.warmup_steps")
    names = [(f"{MODEL}.lora_{part}", f"{MODEL}.lora.{part}") for part in ("rank", "alpha")]
    rank, alpha = (t.take(old, default) or t.take(new) for (old, new), default in zip(names, (0, None), strict=True))
    rank, alpha = rank or 0, alpha or 16
    for _, new in names:
        t.take(new)
    if rank and t.ours.get("trainer.backend") == "megatron":
        t.missing.append(f"adapters on Megatron (lora rank {rank}); they need trainer.backend=fsdp2")
    if adapter := t.take(f"{MODEL}.lora_adapter_path"):
        t.missing.append(
            f"a start from an adapter ({MODEL}.lora_adapter_path={adapter}); merge it into the model first"
        )
    targets = t.take(f"{MODEL}.target_modules")
    if rank:
        if targets not in (None, "all-linear"):
            targets = targets if isinstance(targets, list) else [targets]
            t.put("trainer.lora.targets", targets, f"{MODEL}.target_modules")
        t.put("trainer.lora.rank", rank, f"{MODEL}.lora_rank")
        t.put("trainer.lora.alpha", alpha, f"{MODEL}.lora_alpha")
    loggers = t.take("trainer.logger", ["console", "wandb"])
    loggers = loggers if isinstance(loggers, list) else [loggers]
    t.put("tracking.backends", [name for name in loggers if name in TRACKERS], "trainer.logger")
    if missing := [name for name in loggers if name not in TRACKERS]:
        t.notes.append(f"trackers without a counterpart: {', '.join(map(str, missing))}")


def _warmup(t: Translation, model: str, ours: str) -> None:
    """The scheduler goes on once in a step there, and once in an optimizer's step here (`lr_scheduler.step()`)."""
    keys = [f"{model}.optim.lr_warmup_steps", f"{model}.optim.lr_warmup_steps_ratio"]
    steps, ratio = t.take(keys[0]), t.take(keys[1], 0.0)
    if (steps is None or steps < 0) and ratio:
        if "trainer.steps" not in t.ours:
            t.unknown.append(f"{ours}: {keys[1]}={ratio} are {ratio} * all optimizer steps")
            return
        steps = int(ratio * t.ours["trainer.steps"])
    each = t.ours.get("trainer.minibatches", 1) * t.ours.get("trainer.epochs", 1)
    t.put(ours, _or_off(steps or 0) * each, *keys)


def _advantage(t: Translation) -> None:
    if _prime(t):
        return
    name = t.take("algorithm.adv_estimator", "gae")
    name = ADVANTAGES.get(name, name)
    normalises = t.take("algorithm.norm_adv_by_std_in_grpo", True)
    if not normalises and name == "grpo":
        name = "dr_grpo"
    if not normalises and name == "grpo_passk":
        t.put("algorithm.advantage_options.passk_std", False, "algorithm.norm_adv_by_std_in_grpo")
    t.put("algorithm.advantage", name, "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo")
    if name == "gae":
        t.translate(CRITIC_KEYS)
        _warmup(t, "critic", "critic.lr_warmup_steps")
        if not any(key.startswith("critic.") for key in t.ours):
            t.ours["critic"] = {}
    keys, weights = t.take("algorithm.gdpo_reward_keys"), t.take("algorithm.gdpo_reward_weights")
    if keys and weights:
        options = dict(zip(keys, weights, strict=False))
        t.put("algorithm.advantage_options.gdpo_weights", options, "algorithm.gdpo_reward_weights")


def _prime(t: Translation) -> bool:
    """Translate the recipe PRIME, whose reward model is trained beside the policy; return whether this is one."""
    model, coefs = "reward_model.model", ("algorithm.reward_dpo_coef", "algorithm.reward_gt_coef")
    if not any(key in t.given for key in (*coefs, f"{model}.update", f"{model}.beta_train")):
        return False
    process, outcome = (t.take(key, 5.0) for key in coefs)
    if not outcome or t.take(f"{model}.loss_type", "ce") != "ce":
        t.missing.append(f"PRIME with {coefs[1]}={outcome} or another {model}.loss_type than ce")
        return True
    t.take("reward_model.enable"), t.take("algorithm.adv_estimator")
    t.put("algorithm.advantage", "prime", *coefs, f"{model}.update", f"{model}.beta_train")
    t.put("algorithm.advantage_options.prime_coef", process / outcome, *coefs)
    t.translate(
        (
            Key(f"{model}.beta_train", "algorithm.advantage_options.prime_beta", 0.05),
            Key(f"{model}.path", "critic.path"),
            Key(f"{model}.ref_path", "algorithm.kl.reference_path"),
            Key(f"{model}.optim.lr", "critic.learning_rate", 1e-6),
            Key(f"{model}.optim.grad_clip", "critic.grad_clip", 10.0),
        )
    )
    if t.take(f"{model}.update", "before") == "before":
        t.notes.append(f"{model}.update: tokens' rewards are those from before the reward model's step, verl's `after`")
    return True


def _loss(t: Translation) -> None:
    mode = t.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    bounds = [t.take(f"{ACTOR}.clip_ratio_{side}", 0.2) for side in ("low", "high")]
    shared = t.take(f"{ACTOR}.clip_ratio", 0.2)
    theirs = [f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"]
    low, high = (shared if bound is None else bound for bound in bounds)
    if shared not in (low, high):
        t.notes.append(f"{ACTOR}.clip_ratio={shared} holds in verl only where clip_ratio_low and _high are null")
    if mode in ("dppo_tv", "dppo_kl"):
        t.put(f"algorithm.loss_options.{mode}", low, theirs[0])
        if low != high:
            t.put("algorithm.loss_options.dppo_high", high, theirs[1])
        t.put("algorithm.loss_options.dppo_cap", t.take(f"{ACTOR}.clip_ratio_c", 3.0), f"{ACTOR}.clip_ratio_c")
    else:
        # A ratio is never below 0, so that every larger bound is none.
        t.put("algorithm.clip_low", min(low, 1.0), theirs[0])
        t.put("algorithm.clip_high", high, theirs[1])
    if mode != "bypass_mode":
        t.put("algorithm.loss", LOSSES.get(mode, mode), f"{ACTOR}.policy_loss.loss_mode")
    aggregation = t.take(f"{ACTOR}.loss_agg_mode", "token-mean")
    if mode in ("sapo", "geo_mean"):
        aggregation = "seq-mean-token-mean"
        t.notes.append(f"{mode}: verl takes seq-mean-token-mean whatever loss_agg_mode says, and so it is written")
    t.put("algorithm.aggregation", aggregation, f"{ACTOR}.loss_agg_mode", f"{ACTOR}.policy_loss.loss_mode")
    if aggregation == "seq-mean-token-sum-norm":
        # Responses are padded to the longest that the config allows.
        length = t.take(f"{ACTOR}.loss_scale_factor") or t.number("data.max_response_length", 512)
        t.put("algorithm.norm_length", length, f"{ACTOR}.loss_scale_factor", "data.max_response_length")


def _kl(t: Translation) -> None:
    in_loss, in_reward = t.take(f"{ACTOR}.use_kl_loss", False), t.take("algorithm.use_kl_in_reward", False)
    if in_loss and in_reward:
        t.notes.append("a KL in the loss and in the reward at once: only the one in the loss is written")
    loss = (t.take(f"{ACTOR}.kl_loss_coef", 0.001), t.take(f"{ACTOR}.kl_loss_type", "low_var_kl"))
    reward = (t.take("algorithm.kl_ctrl.kl_coef", 0.001), t.take("algorithm.kl_penalty", "kl"))
    controller = t.take("algorithm.kl_ctrl.type", "fixed")
    target, horizon = t.take("algorithm.kl_ctrl.target_kl", 0.1), t.take("algorithm.kl_ctrl.horizon", 10000)
    if not in_loss and not in_reward:
        return
    coef, estimator = loss if in_loss else reward
    t.put("algorithm.kl.coef", coef, f"{ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef")
    name = ESTIMATORS.get(estimator, estimator)
    t.put("algorithm.kl.estimator", name, f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty")
    if not in_loss:
        t.put("algorithm.kl.place", "reward", "algorithm.use_kl_in_reward")
        if controller == "adaptive":
            t.put("algorithm.kl.adaptive.target", target, "algorithm.kl_ctrl.target_kl")
            t.put("algorithm.kl.adaptive.horizon", horizon, "algorithm.kl_ctrl.horizon")


def _shaping(t: Translation) -> None:
    method, power = t.take("algorithm.pf_ppo.reweight_method", "pow"), t.take("algorithm.pf_ppo.weight_pow", 2.0)
    if t.take("algorithm.use_pf_ppo", False):
        t.put("algorithm.shaping.resample", method, "algorithm.pf_ppo.reweight_method")
        if method == "pow" and power != 2.0:
            t.notes.append(f"algorithm.pf_ppo.weight_pow={power}: algorithm.shaping.resample=pow squares rewards")
    sections = ("reward_model", "reward_model.reward_kwargs", "reward.reward_kwargs")
    for buffer in (f"{section}.overlong_buffer{end}" for section in sections for end in ("", "_cfg")):
        length, factor = t.take(f"{buffer}.len"), t.take(f"{buffer}.penalty_factor")
        if t.take(f"{buffer}.enable", False):
            t.put("algorithm.shaping.overlong.max_tokens", t.ours["rollout.max_tokens"], f"{buffer}.enable")
            t.put("algorithm.shaping.overlong.cache_tokens", length, f"{buffer}.len")
            t.put("algorithm.shaping.overlong.factor", factor or 1.0, f"{buffer}.penalty_factor")


def _rewards(t: Translation) -> None:
    for section in ("reward.custom_reward_function", "custom_reward_function"):
        path, name = t.take(f"{section}.path"), t.take(f"{section}.name", "compute_score")
        if path:
            functions: list[dict[str, Any]] = [{"name": f"{path}:{name}"}]
            t.put("reward.functions", functions, f"{section}.path")
            if not Path(str(path)).is_file():
                t.notes.append(f"reward.functions: there is no file {path} here")
            return
    if "reward.functions" in t.ours:
        return
    given = t.take("data.train_files")
    files = given if isinstance(given, list) else [given]
    sources = sorted({source for file in files for source in data_sources(file)})
    named = sources or [str(file) for file in files]
    if all(re.search(r"gsm8k|math|aime", name, re.IGNORECASE) for name in named):
        hashes = ["gsm8k" in name for name in named]
        ways = ["regex:#### (-?[0-9.,]+)"] * any(hashes) + ["boxed"] * (not all(hashes))
        t.put("reward.functions", [{"name": "math", "extract": [ways] if len(ways) > 1 else ways}], "data.train_files")
        why = f"the column data_source, {', '.join(sources)}" if sources else "the names of the files"
        t.notes.append(f"reward.functions: verl chooses a reward by data_source; math, by {why}")
        return
    t.put("reward.functions", [{"name": f"{FILL_IN}.py:compute_score"}], "data.train_files")
    t.unknown.append("reward.functions: verl chooses a reward by the column data_source; name that of your data")
