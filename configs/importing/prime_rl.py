"""prime-rl's `rl` command, as its repository has it in August 2026 (559b4477), and keys that it had before."""

from pathlib import Path
from typing import Any

from rl_async.configs.importing.translation import (
    EVERY_TASK,
    FILL_IN,
    Key,
    NotThisKind,
    Translation,
    flatten,
    our_default,
    overridden,
    read_sections,
)
from rl_async.errors import ConfigError


def _whole(number: float) -> int:
    """The number without a fraction. Raises ValueError if it has one."""
    if number != int(number):
        raise ValueError("not a whole number")
    return int(number)


OPTIMIZER, LOSS, SAMPLING = "trainer.optim", "trainer.loss", "orchestrator.train.sampling"
BUFFER = "orchestrator.buffer"
KEYS = (
    Key("model.name", "model.path"),
    Key("max_steps", "trainer.steps"),
    Key("orchestrator.group_size", "rollout.group_size", 1),
    Key(f"{SAMPLING}.temperature", "rollout.temperature", 1.0),
    Key("orchestrator.sampling.temperature", "rollout.temperature"),
    Key("orchestrator.max_off_policy_steps", "queue.max_staleness", 8),
    Key(f"{OPTIMIZER}.lr", "trainer.learning_rate", 1e-6),
    Key(f"{OPTIMIZER}.weight_decay", "trainer.weight_decay", 0.01),
    Key(f"{OPTIMIZER}.max_norm", "trainer.grad_clip", 1.0),
    Key("inference.vllm.tensor_parallel_size", "rollout.tensor_parallel"),
    Key("inference.parallel.tp", "rollout.tensor_parallel"),
    Key("inference.vllm.quantization", "rollout.quantization"),
    Key("trainer.model.cp", "trainer.sequence_parallel"),
    Key("trainer.dp_replicate", "trainer.replicas"),
    Key("trainer.model.dp_replicate", "trainer.replicas"),
    Key("trainer.model.lora.alpha", "trainer.lora.alpha", convert=_whole),
    Key("trainer.enable_router_replay", "trainer.router_replay", convert=lambda on: "always" if on else "never"),
    Key("ckpt.interval", "trainer.checkpoint_every"),
    Key("ckpt.keep_last", "trainer.keep_checkpoints"),
    # A pool of easy and one of hard tasks, which are not drawn from.
    Key(f"{BUFFER}.easy_threshold", "data.curriculum.easy"),
    Key(f"{BUFFER}.hard_threshold", "data.curriculum.hard"),
    Key(f"{BUFFER}.online_difficulty_filtering", "algorithm.shaping.dynamic_sampling", False),
    Key("monitors.wandb.project", "tracking.project"),
    Key("wandb.project", "tracking.project"),
)
# Shared keys, and those of the components that they fill in (`propagate_shared_fields`).
SHARED = {
    "max_steps": ("trainer.max_steps", "orchestrator.max_steps"),
    "model.name": ("trainer.model.name", "orchestrator.model.name"),
    **{
        key: (f"trainer.{key}", f"orchestrator.{key}")
        for key in ("model.vlm", "ckpt.interval", "ckpt.keep_last", "monitors.wandb.project", "monitors.wandb.name")
    },
}
ADAM_KEYS = (Key(f"{OPTIMIZER}.betas2", "trainer.beta2", 0.999),)
# No gradient has a norm like this.
UNCLIPPED = 1e9
_ENGINE = "an engine's own settings; rollout.engine_args passes flags on"
NO_COUNTERPART = {
    BUFFER: "tasks come back from the pools by data.curriculum.again",
    "orchestrator.concurrency": "concurrent episodes are bounded by agent.concurrency, and start with it",
    "orchestrator.renderer": "chats are rendered by the model's own template",
    f"{SAMPLING}.extra_body": "requests of an environment have no further fields",
    "orchestrator.model": "engines start from model.path",
    "trainer.loss": "a number of another loss",
    "trainer.optim": "a number of another optimizer",
    "trainer.scheduler": "schedules fall to 0 over the whole run here",
    "trainer.model.ep": "fsdp2 shards experts like all weights",
    "trainer.model.ac": "activation checkpointing is whole or off",
    "trainer.model": "the model is Transformers' own",
    "inference.vllm.model": "engines start from model.path; see rollout.quantization",
    "trainer.model.quantization": "the trainer's weights are in model.dtype",
    "inference": _ENGINE,
    "monitors": "give the run's name to `rl-async launch` as --name",
    "wandb": "give the run's name to `rl-async launch` as --name",
    "resume": "give --resume to `rl-async launch`",
    "weight_broadcast": "weights travel by weight_sync.way=auto",
    "slurm": "see docs/how-to/clusters.md",
    "env_vars": "set variables before `rl-async launch`",
    "orchestrator": "not read",
    "trainer": "not read",
    **dict.fromkeys(("deployment", "ckpt", "log", "output_dir", "model", "run", "clean"), "not here"),
}


def write(file: Path, more: list[str]) -> str:
    """Our YAML for the TOML in ``file`` and the ``a.b=c`` in ``more``."""
    sections = read_sections(file)
    given = overridden(flatten(sections), more, "an argument")
    if given and not any(key.startswith("orchestrator.") for key in given):
        raise NotThisKind(f"{file}: no section orchestrator, which a config of prime-rl's `rl` has")
    # TOML has no null; prime-rl writes it as a text.
    off = {key for key, value in given.items() if value in (None, "None")}
    t = Translation({key: value for key, value in given.items() if key not in off})
    _share(t)
    keys = ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env")
    sources = next((found for key in keys if (found := _list(t, key))), [])
    _shared_settings(t, sources)
    t.translate(KEYS)
    t.put("trainer.activation_checkpointing", "trainer.model.ac" not in off, "trainer.model.ac")
    if t.given.get("trainer.model.ac.freq") == 1:
        t.take("trainer.model.ac.freq")
    _adapters(t, sections)
    _batch(t)
    t.put("trainer.minibatches", 1, "trainer")
    t.put("rollout.engine", "vllm", "inference")
    _devices(t)
    _lengths(t)
    _optimizer(t, sections, off)
    _algorithm(t)
    _loss(t)
    _environment(t, sources)
    if any(key.startswith(("wandb.", "monitors.wandb.")) for key in t.given):
        t.put("tracking.backends", ["wandb"], "wandb.project", "wandb.name", "monitors.wandb.project")
    if "trainer.steps" not in t.ours:
        t.unknown.append(f"trainer.steps ({our_default('trainer.steps')} if left out): prime-rl has no end without it")
    if any(key.startswith(("data.fake.", "trainer.data.fake.")) for key in t.given):
        t.missing.append("a trainer of random batches (trainer.data.fake)")
    t.notes.append("prime-rl drops a row that is too old; queue.max_staleness bounds it by admission")
    return t.text(f"From {file} (prime-rl).", NO_COUNTERPART)


def _share(t: Translation) -> None:
    """Read what the components' sections say alike as the shared key; a value that differs stays where it is."""
    for shared, components in SHARED.items():
        for component in components:
            for key in [key for key in t.given if f"{key}.".startswith(f"{component}.")]:
                whole = shared + key.removeprefix(component)
                if t.given.setdefault(whole, t.given[key]) == t.given[key]:
                    del t.given[key]


def _has(t: Translation, sections: dict[str, Any], key: str) -> bool:
    """Whether there is such a section, which may be empty."""
    found: Any = sections
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return isinstance(found, dict) or any(name.startswith(f"{key}.") for name in t.given)


def _adapters(t: Translation, sections: dict[str, Any]) -> None:
    """An empty section trains adapters, too."""
    section = "trainer.model.lora"
    if not _has(t, sections, section):
        return
    t.ours["trainer.lora.rank"] = t.number(f"{section}.rank", 16)
    if modules := t.take(f"{section}.target_modules"):
        t.put("trainer.lora.targets", modules, f"{section}.target_modules")
    t.only(f"{section}.dropout", 0)
    t.only(f"{section}.modules_to_save", [])


def _batch(t: Translation) -> None:
    """Groups of a step. Raises ConfigError where prime-rl refuses the batch, too."""
    group = t.number("orchestrator.group_size", 1, least=1)
    if tokens := t.take("orchestrator.token_batch_size"):
        default = our_default("data.train_batch_groups")
        t.unknown.append(
            f"data.train_batch_groups ({default} if left out): prime-rl takes rows until they have {tokens} tokens; "
            f"here, {tokens} / (rollout.group_size x the tokens of an average row)"
        )
        return
    rows = t.number("orchestrator.batch_size", 128)
    if rows % group:
        raise ConfigError(f"orchestrator.batch_size={rows} is no multiple of orchestrator.group_size={group}")
    t.put("data.train_batch_groups", rows // group, "orchestrator.batch_size", "orchestrator.group_size")


def _devices(t: Translation) -> None:
    """Trainer ranks and engines from GPUs, or from nodes and their GPUs."""
    each = t.number("deployment.gpus_per_node", 8)
    nodes = t.number("deployment.num_train_nodes", 0)
    given = t.take("deployment.num_infer_nodes")
    parallel = t.ours.get("rollout.tensor_parallel", 1)
    copies = ("inference.vllm.data_parallel_size", "inference.parallel.dp")
    if t.take("deployment.type", "single_node") == "multi_node":
        per_replica = t.number("deployment.num_infer_nodes", 1) if given is not None else _nodes_of_a_replica(t)
        replicas = t.number("deployment.num_infer_replicas", 1, least=1)
        gpus = per_replica * replicas * each
        t.put("trainer.ranks", nodes * each, "deployment.num_train_nodes")
        if together := t.number("deployment.nodes_per_fsdp_group", 0):
            groups = _divided(nodes, together, "deployment.num_train_nodes", "deployment.nodes_per_fsdp_group")
            t.put("trainer.replicas", groups, "deployment.nodes_per_fsdp_group")
    else:
        replicas = 1
        # Before there was a section deployment, inference.parallel counted the GPUs.
        counted = parallel * t.number(copies[1], 1) if any(k.startswith("inference.parallel.") for k in t.given) else 1
        gpus = t.number("deployment.num_infer_gpus", counted)
        t.put("trainer.ranks", t.number("deployment.num_train_gpus", 1), "deployment.num_train_gpus")
    theirs = ("deployment.num_infer_gpus", "deployment.num_infer_nodes", "inference.vllm.tensor_parallel_size")
    engines = _divided(gpus, parallel, "the GPUs of inference", "inference.vllm.tensor_parallel_size")
    t.put("rollout.engines", engines, *theirs)
    told = next((t.take(key) for key in copies if key in t.given), engines // replicas)
    # Several nodes count the copies of all, or of one.
    if told not in (engines // replicas, each // parallel):
        t.notes.append(f"{copies[0]}={told}: the GPUs of inference have room for {engines} engines, which were written")
    if t.take("inference.vllm.enable_expert_parallel", False):
        t.put("rollout.expert_parallel", parallel, "inference.vllm.enable_expert_parallel")
        if parallel == 1:
            t.notes.append(
                "rollout.expert_parallel: copies of the model share experts there; an engine here has all of them on "
                "its rollout.tensor_parallel ranks, which must have room"
            )


def _nodes_of_a_replica(t: Translation) -> int:
    """Nodes of inference that only inference's own section tells."""
    section = "inference.deployment"
    kind = t.take(f"{section}.type", "single_node")
    if kind == "disaggregated":
        t.notes.append(f"{section}: prefill and decoding share an engine here")
        parts = [
            (f"{section}.{part}_nodes_per_replica", f"{section}.num_{part}_replicas") for part in ("prefill", "decode")
        ]
        return sum(t.number(nodes, 1) * t.number(copies, 1) for nodes, copies in parts)
    return t.number(f"{section}.num_nodes", 2) if kind == "multi_node" else 1


def _divided(number: int, by: int, name: str, parts: str) -> int:
    """The quotient. Raises ConfigError, as prime-rl does, if there is a remainder."""
    if by < 1 or number % by:
        raise ConfigError(f"{parts}={by} does not divide {name}, {number}")
    return number // by


def _lengths(t: Translation) -> None:
    """Whole episodes, single answers and micro-batches, which have the run's length unless they are given."""
    shared = t.number("seq_len", 2048)
    episode = t.number("orchestrator.seq_len", shared)
    longest = max(t.number("inference.vllm.max_model_len", episode), episode)
    t.put("agent.max_tokens", episode, "seq_len", "orchestrator.seq_len")
    t.put("rollout.max_model_len", longest, "seq_len", "orchestrator.seq_len", "inference.vllm.max_model_len")
    if "inference.vllm.max_model_len" not in t.given or longest > episode:
        t.notes.append(
            f"agent.max_tokens: an episode ends at {episode} tokens here; there it goes on to the engine's length, and "
            "its first seq_len tokens are trained"
        )
    packed = t.number("trainer.model.seq_len", shared)
    t.put("trainer.max_tokens_per_microbatch", packed, "seq_len", "trainer.model.seq_len")
    names = (f"{SAMPLING}.max_completion_tokens", "orchestrator.sampling.max_tokens")
    given = [value for name in names if (value := t.take(name)) is not None]
    t.put("rollout.max_tokens", given[0] if given else episode, *names, "seq_len")
    t.truncation(f"{SAMPLING}.extra_body.top_k", f"{SAMPLING}.extra_body.top_p")
    t.only(f"{SAMPLING}.extra_body.min_p", 0)
    # A prompt is bounded by the episode alone there.
    t.put("data.max_prompt_tokens", max(episode - 1, 1), "seq_len", "orchestrator.seq_len")


def _optimizer(t: Translation, sections: dict[str, Any], off: set[str]) -> None:
    name = t.take(f"{OPTIMIZER}.type", "adamw")
    if name == "adamw":
        t.only(f"{OPTIMIZER}.betas1", 0.9)
        t.translate(ADAM_KEYS)
    elif name == "muon":
        # Both scale a step by 0.2 sqrt(max(rows, columns)), and decay weights alike.
        t.put("trainer.optimizer", name, f"{OPTIMIZER}.type")
        t.only(f"{OPTIMIZER}.mu", 0.95)
        t.only(f"{OPTIMIZER}.betas1", 0.9)
        t.translate((Key(f"{OPTIMIZER}.betas2", "trainer.beta2", 0.95),))
        t.notes.append(f"{OPTIMIZER}.type=muon: Nesterov's momentum here, plain momentum there")
    else:
        t.notes.append(
            f"{OPTIMIZER}.type={name}: the optimizers here are AdamW and Muon, with another best learning rate than "
            f"{t.ours.get('trainer.learning_rate', 1e-6)}"
        )
    _schedule(t)
    # prime-rl itself switches the clip off with either of the last two.
    clip, offloaded, deepep = f"{OPTIMIZER}.max_norm", "trainer.model.full_offload", "trainer.model.ep_comm_backend"
    whole = _has(t, sections, offloaded) or bool(t.take(offloaded, False))
    if whole or t.take("trainer.model.fsdp_cpu_offload", False):
        t.ours |= {"trainer.cpu_offload": True, "model.device": "gpu"}
    if clip in off or whole or t.take(deepep) == "deepep":
        t.ours["trainer.grad_clip"] = UNCLIPPED
    if not t.given.get("ckpt.interval"):
        t.put("trainer.checkpoint_every", 0, "ckpt")


def _schedule(t: Translation) -> None:
    """`linear` is constant there but for its warm-up and its last `decay_steps`; every one here falls to 0."""
    kind = t.take("trainer.scheduler.type", "constant")
    if kind == "constant":
        return
    warmup = t.number("trainer.scheduler.warmup_steps", 10)
    t.put("trainer.warmup_steps", warmup, "trainer.scheduler.type")
    if kind == "linear":
        decay = t.number("trainer.scheduler.decay_steps", 10)
        if decay and warmup + decay != t.ours.get("trainer.steps"):
            kind = "constant"
            t.notes.append(
                f"trainer.schedule: the learning rate falls linearly in the last {decay} steps there; written: constant"
            )
        elif not decay:
            kind = "constant"
    t.put("trainer.schedule", kind, "trainer.scheduler.type")


OPSD = {
    "demo_key": "demonstration",
    "template": "Here is an example of an expert response:\n<demonstration>\n{demonstration}\n</demonstration>",
}


def _algorithm(t: Translation) -> None:
    """`grpo` is the reward less the mean of its group, `opd` a teacher's score of the sampled tokens.

    In `opsd` the policy itself scores them, having read a demonstration.
    """
    key = "orchestrator.algo.type"
    name = t.take(key, "grpo")
    t.put("algorithm.advantage", {"max_rl": "max_rl"}.get(name, "dr_grpo"), key)
    if name in ("grpo", "max_rl", "echo"):
        _rewards(t)
    if name == "opd":
        url, model = (t.take(f"orchestrator.algo.teacher.{part}") for part in ("base_url", "name"))
        if not (url and model):
            raise ConfigError("orchestrator.algo.type=opd needs orchestrator.algo.teacher's name and base_url")
        t.put("algorithm.teacher.endpoint", {"url": url, "model": model}, "orchestrator.algo.teacher")
        t.notes.append(
            "algorithm.teacher: its score is compared with the policy's when the batch is taken, the ratio is clipped "
            "as for rewards, not on one side at 0.2 of probability, and the answers' rewards are measured only"
        )
    elif name == "echo":
        _echo(t)
    elif name == "opsd":
        column, template = (t.take(f"orchestrator.algo.{part}", usual) for part, usual in OPSD.items())
        t.put("algorithm.teacher.hint", template.replace("{demonstration}", "{ground_truth}"), key)
        t.notes.append(f"algorithm.teacher.hint: the demonstration ({column}) must be the tasks' ground truth")
    elif name not in ("grpo", "max_rl"):
        t.missing.append(f"the algorithm {key}={name}; there are grpo (dr_grpo here), max_rl, echo, opd and opsd")


PENALTY = {"num_output_tokens_weight": 0.25, "num_input_tokens_weight": 0.1, "num_turns_weight": 0.1}


def _rewards(t: Translation) -> None:
    """How groups are compared: their size, the penalty for length in the comparison, and those without contrast."""
    if t.given.get("orchestrator.group_size", 1) == 1:
        t.unknown.append("rollout.group_size: prime-rl takes 1, with which every advantage of its grpo is 0; 8 or more")
    section = "orchestrator.algo.length_penalty"
    if t.take(f"{section}.type") is not None:
        weights = [t.take(f"{section}.{part}", usual) for part, usual in PENALTY.items()]
        if any(weights):
            t.put("algorithm.advantage", f"{FILL_IN}.py:advantage", section)
            t.unknown.append(
                f"algorithm.advantage: prime-rl subtracts, from each reward, the group's mean reward times the sum of "
                f"{weights} x (the row's sampled tokens, other tokens and turns, each / the group's largest), and then "
                "their mean; write that function (docs/reference/algorithms.md), or choose dr_grpo and do without"
            )
    if t.take("orchestrator.train.filter_zero_advantages", True):
        t.notes.append(
            "orchestrator.train.filter_zero_advantages: tokens without advantage count in the loss's mean and in its "
            "penalty here; algorithm.shaping.dynamic_sampling replaces their groups"
        )


def _echo(t: Translation) -> None:
    """Observations are learned with one weight here, and those of tools alone by default there."""
    part = "orchestrator.algo"
    given = {key.split(".")[-2]: t.take(key) for key in list(t.given) if key.startswith(f"{part}.roles.")}
    weights = given or {"tool": 0.1}
    if t.take(f"{part}.filter.import_path") or len(set(weights.values())) > 1:
        t.missing.append(f"a weight for each role, or a filter of observations ({part}.roles, {part}.filter)")
        return
    t.put("algorithm.observations.coef", next(iter(weights.values())), f"{part}.roles", f"{part}.type")
    t.notes.append(
        f"algorithm.observations: messages of every role are learned, as the template frames them; there, the text of "
        f"{' and '.join(weights)} messages alone"
    )


def _loss(t: Translation) -> None:
    """prime-rl's default loss, DPPO with a penalty, is the preset `prime_rl`."""
    kind = t.take(f"{LOSS}.type", "default")
    if kind not in ("default", "ipo"):
        t.missing.append(f"the loss {LOSS}.type={kind}; write it as algorithm.loss=path.py:name")
        return
    if kind == "ipo":
        t.put("algorithm.loss", "ipo", f"{LOSS}.type")
        t.put("algorithm.correction", "bypass_ppo_clip", f"{LOSS}.type")
        t.put("algorithm.loss_options.ipo", t.take(f"{LOSS}.ipo_threshold", 0.1), f"{LOSS}.ipo_threshold")
    else:
        t.put("algorithm.correction", "prime_rl", f"{LOSS}.type")
        low, high = t.take(f"{LOSS}.dppo_mask_low", 0.2), t.take(f"{LOSS}.dppo_mask_high", 0.2)
        t.put("algorithm.loss_options.dppo_tv", low, f"{LOSS}.dppo_mask_low")
        if low != high:
            t.put("algorithm.loss_options.dppo_high", high, f"{LOSS}.dppo_mask_high")
    t.put("algorithm.loss_options.ipo_penalty", t.take(f"{LOSS}.kl_tau", 1e-3), f"{LOSS}.kl_tau")
    if (tau := t.take(f"{LOSS}.adv_tau", 1.0)) != 1.0:
        t.notes.append(f"{LOSS}.adv_tau={tau} has no counterpart")


def _environment(t: Translation, sources: list[dict[str, Any]]) -> None:
    """Environments of verifiers, which play through the gateway in a Python of their own.

    docs/how-to/environments.md describes it.
    """
    if any(key.startswith("model.vlm.") for key in t.given):
        t.missing.append("images of an environment of verifiers (model.vlm); give them in data or through the gateway")
    if not sources:
        t.put("reward.functions", [{"name": f"{FILL_IN}.py:reward"}], "orchestrator.train.source")
        t.unknown.append("data.path, agent.environment and reward.functions: no environment is named")
    else:
        _play(t, sources)
    _evaluation(t, sources)


EVALUATION = {"interval": 100, "num_examples": -1, "group_size": 1}


def _evaluation(t: Translation, sources: list[dict[str, Any]]) -> None:
    """Evaluations play held-out tasks of training's environments here, and others there, too."""
    section = "orchestrator.eval"
    held_out = _list(t, f"{section}.source") or _list(t, f"{section}.env")
    usual = {name: t.take(f"{section}.{name}", default) for name, default in EVALUATION.items()}
    usual_sampling = {
        key.removeprefix(f"{section}.sampling."): t.take(key)
        for key in list(t.given)
        if key.startswith(f"{section}.sampling.")
    }
    skipped = t.take(f"{section}.skip_first_step", False)
    if not held_out:
        return
    numbers = [{name: source.get(name, value) for name, value in usual.items()} for source in held_out]
    sampling = [usual_sampling | (source.get("sampling") or {}) for source in held_out]
    told = "; ".join(
        f"{_name_of(source)}: every {each['interval']} steps, {each['group_size']} times each of "
        f"{'all' if each['num_examples'] < 0 else each['num_examples']} tasks"
        for source, each in zip(held_out, numbers, strict=True)
    )
    if not {_package_of(source) for source in held_out} <= {_package_of(source) for source in sources}:
        t.notes.append(
            f"{section} ({told}) is left out: an evaluation here plays held-out tasks of the training's environment; "
            "give them as data.eval_path, with eval.every"
        )
        return
    first, how = numbers[0], sampling[0]
    if any(each != first for each in numbers) or any(each != how for each in sampling):
        t.notes.append(f"{section} ({told}): one set of numbers here; written: those of {_name_of(held_out[0])}")
    files = [{"path": f"artifacts/{_name_of(source)}.eval.jsonl"} for source in held_out]
    t.put("data.eval_path", files if files[1:] else files[0]["path"], section)
    t.put("eval.every", first["interval"], section)
    t.put("eval.tasks", EVERY_TASK if first["num_examples"] < 0 else first["num_examples"], section)
    t.put("eval.samples", first["group_size"], section)
    t.put("eval.before", not skipped, section)
    t.put("eval.temperature", how.get("temperature", 1.0), section)
    t.unknown.append(f"data.eval_path: write held-out tasks of {', '.join(map(_name_of, held_out))} there")
    if "temperature" not in how:
        t.notes.append("eval.temperature: 1, unless the model's own generation_config.json has another")
    others = {name: value for name, value in how.items() if name != "temperature" and value is not None}
    if (longest := others.pop("max_completion_tokens", None)) not in (None, t.ours["rollout.max_tokens"]):
        t.notes.append(f"{section}.sampling: answers have rollout.max_tokens in evaluations, too, not {longest}")
    if others:
        t.notes.append(
            f"{section}.sampling: {', '.join(f'{name}={value}' for name, value in others.items())} has no counterpart"
        )


def _list(t: Translation, key: str) -> list[dict[str, Any]]:
    found = t.take(key, [])
    if not isinstance(found, list) or not all(isinstance(source, dict) for source in found):
        raise ConfigError(f"{key}: expected a list of sections")
    return found


def _package_of(source: dict[str, Any]) -> str:
    taskset = (source.get("env") or {}).get("taskset") or {}
    return str(taskset.get("id") or source.get("id") or source.get("name") or "unnamed")


def _name_of(source: dict[str, Any]) -> str:
    return str(source.get("name") or _package_of(source))


def _shared_settings(t: Translation, sources: list[dict[str, Any]]) -> None:
    """Settings of the sources are the run's if all have the same; others cannot be had in one run."""
    for name, run in (("algo", "orchestrator.algo"), ("sampling", SAMPLING), ("group_size", "orchestrator.group_size")):
        given = [source.get(name) for source in sources]
        if given and all(value == given[0] for value in given):
            t.given |= flatten({run: given[0]}) if given[0] is not None else {}
        elif given:
            names = ", ".join(_name_of(source) for source in sources if source.get(name) is not None)
            t.missing.append(f"orchestrator.train.source: {name} of {names}, which is one for the whole run here")


def _play(t: Translation, sources: list[dict[str, Any]]) -> None:
    key = "orchestrator.train.source"
    # A single environment is named like its package, several by names of their own.
    names = [_package_of(sources[0])] if len(sources) == 1 else [_name_of(source) for source in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{key}: two sources are named {twice[0]}")
    t.put("agent.environment", f"verifiers:{','.join(names)}", key, "orchestrator.env")
    t.put("reward.functions", [{"name": "environment"}], key)
    files = [{"path": f"artifacts/{name}.jsonl"} for name in names]
    if len(sources) > 1:
        files = [
            file | ({"weight": source["ratio"]} if "ratio" in source else {})
            for file, source in zip(files, sources, strict=True)
        ]
    t.put("data.path", files if len(sources) > 1 else files[0]["path"], key)
    options = [source.get("env") for source in sources]
    if None not in options:
        t.put("agent.environment_options", dict(zip(names, options, strict=True)) if options[1:] else options[0], key)
        t.put("agent.gateway", {}, key)
        t.put("agent.environment_hosts", {"python": ".venv-verifiers/bin/python"}, key)
    elif len(sources) == 1:
        # The classic interface of verifiers, before 0.4: arguments of load_environment.
        t.put("agent.environment_options", sources[0].get("args") or {}, "orchestrator.env")
        t.put("agent.loop", "tool_agent", "orchestrator.env")
    else:
        t.missing.append(f"several environments of verifiers before 0.4 ({', '.join(names)}) in one run")
    t.unknown.append(
        f"data.path: write the tasks of {' and '.join(names)} there, and install the packages for "
        "agent.environment_hosts.python (docs/how-to/environments.md)"
    )
    _curricula(t, sources)


def _curricula(t: Translation, sources: list[dict[str, Any]]) -> None:
    """Which tasks are drawn, and which of their groups are trained."""
    key = "orchestrator.train.source"
    curricula = [source.get("curriculum") or {} for source in sources]
    gates = [
        [gate for gate in (curriculum.get("gates") or {}).values() if gate.get("type") == "advantage_range"]
        for curriculum in curricula
    ]
    # A teacher has no advantage of an episode, and teaches groups of equal rewards, too.
    if all(gates) and not {"algorithm.teacher.endpoint", "algorithm.teacher.hint"} & t.ours.keys():
        t.put("algorithm.shaping.dynamic_sampling", True, key)
    elif any(gates):
        t.notes.append(
            f"{key}.curriculum.gates are left out; algorithm.shaping.dynamic_sampling is of all environments"
        )
    if any(gate.get("reject_min") or gate.get("reject_max") for several in gates for gate in several):
        t.notes.append(f"{key}.curriculum: only groups without any advantage are drawn anew here, whatever the range")
    samplers = {(curriculum.get("sampler") or {}).get("type", "standard") for curriculum in curricula}
    if samplers != {"standard"}:
        others = ", ".join(sorted(samplers - {"standard"}))
        t.notes.append(f"{key}.curriculum.sampler={others}: tasks are drawn alike here; see queue.sampling")
    elif any(source.get("env") is not None for source in sources):
        # Tasks come in the order of the taskset, which may have shuffled them itself.
        t.put("data.shuffle", False, key)
