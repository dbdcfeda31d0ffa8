"""TRL's GRPOConfig, as of version 1.16, with the TrainingArguments that it extends."""

import ast
import re
from pathlib import Path
from typing import Any

from rl_async.configs.importing.translation import (
    EVERY_TASK,
    FILL_IN,
    STRUCTURED,
    Key,
    Program,
    Translation,
    Values,
    keywords,
    our_default,
    overridden,
    read_program,
    read_structured,
    resolve_references,
    script_flags,
)
from rl_async.errors import ConfigError

KEYS = (
    # This one is of ModelConfig, which TRL's scripts read from the same file.
    Key("model_name_or_path", "model.path"),
    Key("num_generations", "rollout.group_size", 8),
    Key("temperature", "rollout.temperature", 1.0),
    Key("max_completion_length", "rollout.max_tokens", 512),
    Key("shuffle_dataset", "data.shuffle", True),
    Key("learning_rate", "trainer.learning_rate", 1e-6),
    Key("weight_decay", "trainer.weight_decay", 0.0),
    Key("adam_beta2", "trainer.beta2", 0.999),
    Key("max_grad_norm", "trainer.grad_clip", 1.0),
    Key("lr_scheduler_type", "trainer.schedule", "linear", lambda name: str(name).removesuffix("_with_warmup")),
    Key("warmup_steps", "trainer.warmup_steps", 0),
    Key("num_iterations", "trainer.epochs", 1),
    Key("max_steps", "trainer.steps", skip=(None, -1)),
    Key("save_steps", "trainer.checkpoint_every", 500),
    Key("save_total_limit", "trainer.keep_checkpoints"),
    Key("gradient_checkpointing", "trainer.activation_checkpointing", True),
    Key("seed", "seed", 42),
    Key("epsilon", "algorithm.clip_low", 0.2),
    Key("delta", "algorithm.loss_options.clip_dual"),
    Key("sapo_temperature_pos", "algorithm.loss_options.sapo_tau_positive", 1.0),
    Key("sapo_temperature_neg", "algorithm.loss_options.sapo_tau_negative", 1.05),
    Key("vespo_k_pos", "algorithm.loss_options.vespo_k_positive", 2.0),
    Key("vespo_k_neg", "algorithm.loss_options.vespo_k_negative", 3.0),
    Key("vespo_lambda_pos", "algorithm.loss_options.vespo_lambda_positive", 3.0),
    Key("vespo_lambda_neg", "algorithm.loss_options.vespo_lambda_negative", 2.0),
    Key("top_entropy_quantile", "algorithm.top_entropy", 1.0),
    Key("off_policy_mask_threshold", "algorithm.off_policy_mask"),
    Key("beta", "algorithm.kl.coef", 0.0),
    Key("entropy_coef", "algorithm.entropy_coef", 0.0),
    Key("mask_truncated_completions", "algorithm.shaping.overlong_filter", False),
    Key("max_tool_calling_iterations", "agent.max_turns", convert=lambda turns: turns + 1),
)
# Keys of earlier versions.
OTHER_KEYS = (Key("max_prompt_length", "data.max_prompt_tokens"),)
AGGREGATION = {
    **dict.fromkeys(("grpo", "sapo"), "seq-mean-token-mean"),
    "luspo": "seq-mean-token-sum",
    **dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), "token-mean"),
    "dr_grpo": "seq-mean-token-sum-norm",
}


def _words(value: Any) -> list[str]:
    """A list that is written with commas as well as with spaces."""
    words = value if isinstance(value, list) else [value]
    return [word for text in words for word in re.split(r"[,\s]+", str(text)) if word]


LORA_KEYS = (
    Key("lora_r", "trainer.lora.rank", 16),
    Key("lora_alpha", "trainer.lora.alpha", 32),
    Key("lora_target_modules", "trainer.lora.targets", convert=_words),
    Key("use_rslora", "trainer.lora.rank_stabilized", False),
)
CLASSES = ("GRPOConfig", "ModelConfig", "ScriptArguments")
# The word of a command that GRPO's flags follow.
_PROGRAM = re.compile(r"grpo|(.*/)?\w+\.py")
# A command among the prose of a program's text, with the lines that backslashes join to it.
_COMMAND = re.compile(
    r"^[ \t]*(?:[A-Z_]+=\S+ )*(?:accelerate|python3?|torchrun|trl|uv) .*(?:(?<=\\)\n.*)*", re.MULTILINE
)
# Rewards of TRL that a scorer here gives.
REWARDS: dict[str, dict[str, Any]] = {"accuracy_reward": {"name": "math", "extract": ["boxed"]}}
TRACKERS = ("tensorboard", "swanlab", "wandb", "mlflow")
NO_COUNTERPART = {
    "per_device_train_batch_size": "micro-batches are packed to trainer.max_tokens_per_microbatch",
    "num_train_epochs": "a run ends after trainer.steps",
    **dict.fromkeys(("min_p", "repetition_penalty"), "not here"),
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), "the reference stays"),
    **dict.fromkeys(("lora_dropout", "lora_r", "lora_alpha", "lora_target_modules"), "not here, or without use_peft"),
    **dict.fromkeys(("chat_template_kwargs", "chat_template_path"), "prompts are rendered by the template's defaults"),
    **dict.fromkeys(("log_completions", "num_completions_to_print", "logging_steps"), "everything is recorded"),
    **dict.fromkeys(("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"), "see rollout.cache_bytes and mode"),
    **dict.fromkeys(("vllm_mode", "vllm_server_base_url", "vllm_server_host"), "engines belong to the run"),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "trackio_space_id", "run_name"), "`rl-async export`, and --name"),
    **dict.fromkeys(("dtype", "torch_dtype", "attn_implementation", "config_file"), "model.dtype, and launch"),
    **dict.fromkeys(("eval_steps", "num_generations_eval"), "eval_strategy is no"),
    "output_dir": "give the run's name to `rl-async launch` as --name",
    "warmup_ratio": "write it as trainer.warmup_steps, in optimizer steps",
}


def write(file: Path, more: list[str]) -> str:
    """Our YAML for the fields in ``file`` and the ``name=value`` in ``more``."""
    given, unresolved, program = _read(file)
    t = Translation(overridden(given, more, "an argument"), notes=unresolved)
    t.translate(KEYS + OTHER_KEYS)
    t.truncation("top_k", "top_p")
    t.only("adam_beta1", 0.9)
    if program is not None:
        _trainer(t, program)
    _data(t)
    _length(t)
    _limits(t)
    _loss(t)
    _batches(t)
    _correction(t)
    _devices(t)
    _adapters(t)
    _rewards(t)
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
    if missing := [name for name in names if name not in (*TRACKERS, "none")]:
        t.notes.append(f"trackers without a counterpart: {', '.join(map(str, missing))}")
    t.put("queue.max_staleness", 0, "GRPOTrainer")
    t.notes.append("GRPOTrainer is synchronous; with queue.max_staleness=1 generation overlaps with training")
    return t.text(f"From {file} (TRL, read by the fields of GRPOConfig 1.16).", NO_COUNTERPART)


def _read(file: Path) -> tuple[Values, list[str], Program | None]:
    """The fields in a config file, a Python program or a script with flags, and those whose values cannot be known."""
    if file.suffix in STRUCTURED:
        return read_structured(file), [], None
    if file.suffix != ".py":
        return *_flags(file), None
    program = read_program(file)
    if program.named(("GRPOConfig",)):
        return *keywords(program, CLASSES), program
    # A program that takes the fields from its command line, with commands that start it in the text at its top.
    if not any(isinstance(node, ast.Name) and node.id == "GRPOConfig" for node in ast.walk(program.tree)):
        raise ConfigError(f"{file}: no call of {' or '.join(CLASSES)}")
    found, notes = _flags(file, "\n".join(_COMMAND.findall(program.text())))
    if not found:
        raise ConfigError(f"{file}: its fields are flags; give a file with the command that starts it")
    notes.insert(0, "the program's fields are flags; these are of the command in the text at its top with most of them")
    return found, notes, program


def _flags(file: Path, text: str | None = None) -> tuple[Values, list[str]]:
    found, assumed, _ = script_flags(file, _PROGRAM, text)
    values, unresolved = resolve_references({name.replace("-", "_"): value for name, value in found.items()})
    notes = [*assumed, *unresolved]
    values = {name: _words(value) if name in _LISTS else value for name, value in values.items()}
    named = values.pop("config", None)
    if named is not None:
        beside = file.parent / str(named)
        if not beside.is_file():
            notes.append(f"--config {named}: no such file beside this one, and so it is not read")
        else:
            values = read_structured(beside) | values
    return values, notes


_LISTS = ("lora_target_modules", "reward_funcs", "report_to")


def _trainer(t: Translation, program: Program) -> None:
    """What `GRPOTrainer(...)` gets beside its config: the model, the data, rewards, tools and environments."""
    nodes = list(ast.walk(program.tree))
    media = any(isinstance(node, ast.Constant) and node.value in _MEDIA for node in nodes)
    if media or any(isinstance(node, ast.ImportFrom) and node.module == "PIL" for node in nodes):
        t.missing.append("prompts with images or videos; give images in a column images (docs/how-to/vision.md)")
    if not (calls := program.named(("GRPOTrainer",))):
        return
    arguments = {keyword.arg: keyword.value for keyword in calls[0].keywords if keyword.arg}
    if "model.path" not in t.ours and "model" in arguments:
        try:
            t.put("model.path", program.value(arguments["model"]), "GRPOTrainer")
            t.ours["model.path"] = program.value(arguments["model"])
        except ValueError:
            t.unknown.append(f"model.path: {ast.unparse(arguments['model'])} is no literal")
    for key, ours in (("train_dataset", "data.path"), ("eval_dataset", "data.eval_path")):
        if key in arguments and (path := _dataset(program, arguments[key])):
            t.ours[ours] = path
            t.unknown.append(f"{ours} = {path}: what the program makes of its columns is data.path's templates here")
    if (functions := arguments.get("reward_funcs")) is not None:
        items = functions.elts if isinstance(functions, ast.List) else [functions]
        t.given.setdefault("reward_funcs", [_own(program, item) for item in items])
    if (tools := arguments.get("tools")) is not None and isinstance(tools, ast.List):
        t.ours["agent.tools"] = [_own(program, item) for item in tools.elts]
        t.ours["agent.loop"] = "tool_agent"
    if (factory := arguments.get("environment_factory")) is not None:
        t.ours["agent.environment"] = _own(program, factory)
        t.ours["agent.loop"] = "tool_agent"
        t.notes.append("agent.environment: its methods are tools in TRL; here they are what tools() returns")
    if (rollout := arguments.get("rollout_func")) is not None:
        t.ours["agent.loop"] = _own(program, rollout)
        t.notes.append("agent.loop: a rollout_func takes prompts in TRL; write it as a loop of this project's")
    if arguments.get("peft_config") is not None and (found := program.named(("LoraConfig",))):
        names = {"r": "lora_r", "target_modules": "lora_target_modules"}
        for keyword in found[0].keywords:
            if keyword.arg in ("r", "lora_alpha", "target_modules", "use_rslora", "use_dora"):
                try:
                    t.given.setdefault(names.get(keyword.arg, keyword.arg), program.value(keyword.value))
                except ValueError:
                    t.notes.append(f"{keyword.arg} = {ast.unparse(keyword.value)}: not a literal, and left out")
        # PEFT's own defaults are others than those of TRL's flags.
        t.given.setdefault("lora_r", 8)
        t.given.setdefault("lora_alpha", 8)
        t.given.setdefault("use_peft", True)


_MEDIA = ("image", "images", "image_url", "video", "videos")


def _own(program: Program, expression: ast.expr) -> str:
    """A function or class of the program as a reference to it; what it imports must be filled in."""
    name = ast.unparse(expression)
    defined = any(
        isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.name == name
        for node in ast.walk(program.tree)
    )
    if defined:
        return f"{program.path}:{name}"
    return name if isinstance(expression, ast.Name) and name in REWARDS else f"{FILL_IN}.py:{name.rpartition('.')[2]}"


def _dataset(program: Program, expression: ast.expr) -> str | None:
    """The data set that an expression begins with, as in `load_dataset(NAME, split=...).map(...)`."""
    for _ in range(20):
        if isinstance(expression, ast.Name):
            # A name that is assigned anew each time a column changes: the first assignment loads.
            if not program.assigned.get(expression.id):
                return None
            expression = program.assigned[expression.id][0]
        elif isinstance(expression, ast.Subscript):
            expression = expression.value
        elif isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
            expression = expression.func.value
        elif isinstance(expression, ast.Call):
            break
        else:
            return None
    if not isinstance(expression, ast.Call) or ast.unparse(expression.func) != "load_dataset" or not expression.args:
        return None
    split = next((keyword.value for keyword in expression.keywords if keyword.arg == "split"), None)
    try:
        name, part = program.value(expression.args[0]), program.value(split) if split is not None else "train"
    except ValueError:
        return None
    return f"{name}:{part}" if isinstance(name, str) and isinstance(part, str) else None


def _data(t: Translation) -> None:
    name = t.take("dataset_name")
    train, test = t.take("dataset_train_split", "train"), t.take("dataset_test_split", "test")
    evaluates = t.take("eval_strategy", "no") != "no"
    hub = isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).suffix
    if name is not None:
        t.put("data.path", f"{name}:{train}" if hub else name, "dataset_name")
        if hub and evaluates:
            t.put("data.eval_path", f"{name}:{test}", "dataset_test_split", "dataset_name")
    if not evaluates:
        t.ours.pop("data.eval_path", None)
        return
    t.translate([Key("eval_steps", "eval.every")])
    samples = t.take("num_generations_eval") or t.number("num_generations", 8)
    t.put("eval.samples", samples, "num_generations_eval", "num_generations")
    t.put("eval.temperature", t.take("temperature", 1.0), "temperature")
    t.put("eval.tasks", EVERY_TASK, "eval_strategy")


def _limits(t: Translation) -> None:
    """An episode's limits: vLLM's, or a prompt and an answer; TRL bounds a prompt by the context alone."""
    theirs = ("vllm_max_model_length", "max_completion_length")
    answer = t.ours.get("rollout.max_tokens", 512)
    prompt = t.ours.get("data.max_prompt_tokens", our_default("data.max_prompt_tokens"))
    given = t.take(theirs[0])
    total = max(int(given), answer + 1) if given else prompt + answer
    if given:
        t.put("data.max_prompt_tokens", total - 1, theirs[0])
    elif "max_prompt_length" not in t.given:
        t.notes.append(f"data.max_prompt_tokens: without a limit there; a longer prompt than {prompt} is an error here")
    t.put("agent.max_tokens", total, *theirs)
    t.put("rollout.max_model_len", total, *theirs)
    # Turns end with the tokens there, unless their number is given.
    if "agent.loop" in t.ours and "agent.max_turns" not in t.ours:
        t.put("agent.max_turns", answer, "max_tool_calling_iterations")


def _devices(t: Translation) -> None:
    processes = t.number("num_processes", 0)
    mode = t.take("vllm_mode", "colocate")
    if not processes:
        t.unknown.append(
            "trainer.ranks, rollout.engines and data.train_batch_groups: the number of TRL's processes, which "
            "num_processes=N behind this command gives"
        )
        return
    each = t.ours.get("rollout.tensor_parallel", 1)
    t.put("trainer.ranks", processes, "num_processes")
    if t.given.get("use_vllm") and mode == "server":
        t.unknown.append("rollout.engines: vLLM is a server of its own there, with devices of its own")
    else:
        t.put("rollout.engines", max(processes // each, 1), "num_processes")
        t.put("mode", "colocated", "vllm_mode", "num_processes")


def _adapters(t: Translation) -> None:
    if not t.take("use_peft", False):
        return
    for key in ("use_dora", "load_in_4bit", "load_in_8bit"):
        if t.take(key):
            t.missing.append(f"{key}: adapters are LoRA or rsLoRA on weights in model.dtype")
    t.translate(LORA_KEYS)
    if "trainer.lora.targets" not in t.ours:
        t.put("trainer.lora.targets", ["q_proj", "v_proj"], "use_peft")
        t.notes.append("trainer.lora.targets: PEFT's choice for most architectures where none are given")
    t.ours.setdefault("trainer.lora.rank", t.number("lora_r", 16))


def _rewards(t: Translation) -> None:
    names = t.take("reward_funcs")
    weights = t.take("reward_weights")
    if names is None:
        t.unknown.append("reward.functions: reward functions are arguments of GRPOTrainer in TRL")
        t.ours["reward.functions"] = [{"name": f"{FILL_IN}.py:reward"}]
        return
    names = names if isinstance(names, list) else [names]
    functions = [dict(REWARDS.get(name, {"name": _reward(name)})) for name in map(str, names)]
    if isinstance(weights, list) and len(weights) == len(functions):
        functions = [term | {"weight": float(weight)} for term, weight in zip(functions, weights, strict=True)]
    t.ours["reward.functions"] = functions
    t.notes.append("reward.functions: TRL's take lists of completions; scorers here take one answer each")


def _reward(name: str) -> str:
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module}:{function}" if module else f"{FILL_IN}.py:{name}"


def _length(t: Translation) -> None:
    """Note `num_train_epochs`, which ends TRL's training unless ``max_steps`` is set."""
    if t.take("max_steps") in (None, -1):
        epochs, key = t.take("num_train_epochs", 3.0), "trainer.steps"
        t.unknown.append(
            f"num_train_epochs={epochs}: TRL ends after so many passes over the data, a run here after {key} "
            f"({our_default(key)} if not set); as many passes take {epochs} * prompts / data.train_batch_groups steps"
        )


def _loss(t: Translation) -> None:
    kind, level = t.take("loss_type", "dapo"), t.take("importance_sampling_level", "token")
    high = t.take("epsilon_high") or t.take("epsilon", 0.2)
    if kind == "cispo":
        t.put("algorithm.clip_low", 1.0, "loss_type")
        # There the bound is on r itself, and here on r - 1.
        high -= 1.0
    t.put("algorithm.clip_high", high, "epsilon_high", "epsilon")
    if kind not in AGGREGATION:
        t.missing.append(f"the loss loss_type={kind}; write it as algorithm.loss=path.py:name")
        return
    loss = kind if kind in ("cispo", "sapo", "vespo") else ("gspo" if level == "sequence" else "ppo")
    t.put("algorithm.loss", loss, "loss_type", "importance_sampling_level")
    t.put("algorithm.aggregation", AGGREGATION[kind], "loss_type")
    if kind == "dr_grpo":
        t.put("algorithm.norm_length", t.number("max_completion_length", 512), "max_completion_length")
    if t.ours.get("algorithm.kl.coef"):
        t.put("algorithm.kl.unbiased", t.take("use_bias_correction_kl", True), "use_bias_correction_kl")


def _batches(t: Translation) -> None:
    """Prompts a step and optimizer steps, which TRL derives from the number of its processes."""
    accumulation = t.number("gradient_accumulation_steps", 1)
    batch, steps = t.take("generation_batch_size"), t.take("steps_per_generation")
    group = t.number("num_generations", 8)
    names = ("generation_batch_size", "steps_per_generation", "per_device_train_batch_size")
    device = t.number("per_device_train_batch_size", 8)
    if batch is None:
        batch = device * (steps or accumulation) * max(t.number("num_processes", 1), 1)
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
