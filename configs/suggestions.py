"""Suggestions for a name that does not exist: the nearest one, its replacement, or its name here.

Users misspell keys, keep those of earlier versions, and type those of verl, TRL, slime and prime-rl. To rename a key,
change its struct and add a line to ``MOVED``.
"""

import difflib
from collections.abc import Callable, Iterable


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error message about an unknown name: the closest of ``names`` or, failing that, all.

    Up to three are all named: the closest by its letters may mean the opposite (cuda, cpu).
    """
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if len(known) > 3 else []
    return f"; did you mean {prefix}{close[0]}?" if close else f"; known: {', '.join(known)}"


# Keys that became a section: the section around, the new one, and its keys by their old names. A complete config of an
# earlier version with the values of the last dict means that the section is left out.
GROUPED: tuple[tuple[str, str, dict[str, str], dict[str, object]], ...] = (
    (
        "algorithm.shaping",
        "overlong",
        {"overlong_max_tokens": "max_tokens", "overlong_cache_tokens": "cache_tokens", "overlong_factor": "factor"},
        {"overlong_max_tokens": None},
    ),
    ("algorithm.kl", "adaptive", {"controller": "", "target": "target", "horizon": "horizon"}, {"controller": "fixed"}),
    (
        "queue",
        "sqlite",
        {"journal_folder": "folder", "sqlite_synchronous": "synchronous"},
        {"journal_folder": "", "sqlite_synchronous": "normal"},
    ),
    (
        "queue",
        "redis",
        {"redis_url": "url", "redis_replicas": "replicas"},
        {"redis_url": "redis://127.0.0.1:6379/0", "redis_replicas": 0},
    ),
)
# The new names of old keys and sections, with differences of the value in brackets.
MOVED: dict[str, str] = {
    f"{section}.{old}": f"{section}.{group}.{new}".removesuffix(".")
    for section, group, names, _ in GROUPED
    for old, new in names.items()
} | {
    "sft": "warm_start",
    "trainer.context_parallel": "trainer.sequence_parallel",
    "trainer.compile": "trainer.kernels (compile instead of true)",
    "trainer.min_train_s": "debug.min_train_s",
    "rollout.min_iteration_s": "debug.min_iteration_s",
    "weight_sync.transport": "weight_sync.way",
    "weight_sync.staged": "weight_sync.way (staged, alone or in a list)",
    "weight_sync.delta": "weight_sync.way (delta, alone or in a list)",
    "weight_sync.waves": "weight_sync.way (waves, alone or in a list, for two)",
    "weight_sync.bucket_mb": "weight_sync.bucket_bytes (bytes, not MiB)",
    "rollout.cpu_cache_gb": "rollout.cache_bytes (bytes, not GiB)",
    "rollout.cpu_cache_bytes": "rollout.cache_bytes",
    "algorithm.shaping.max_refills": "algorithm.shaping.dynamic_sampling (a number instead of true)",
    "queue.metrics_port": "tracking.prometheus (true; RUN/prometheus/ says on which port)",
}
# Advice for keys that were removed, or that only other software has.
ABSENT: dict[str, str] = {
    "trainer.attention": "PyTorch's FlashAttention is used where it can be; leave the key out",
    "rollout.data_parallel": "every copy of the model is an engine of its own; use rollout.engines",
    "queue.limits": "a message has at most 512 MiB, a frame half of it, and a connection 5000 requests a second",
    "queue.message_bytes": "a message has at most 512 MiB",
    "queue.slack": "with any queue.sampling but fifo a group may be passed over for one step",
    "queue.max_lease_s": "a lease lasts 4 hours at most, or 8 times agent.episode_timeout_s if that is longer",
    "agent.check_rendering": "one episode in fifty is compared with the chat template of the whole conversation",
    "queue.clients": "put the client's .pub file into clients/ of the folder queue.keys",
    "algorithm.guard.patience": "algorithm.guard acts after three steps in a row",
    "weight_sync.mismatch.tokens": "each engine samples 32 tokens for a comparison",
    "algorithm.shaping.resample_power": "algorithm.shaping.resample=pow squares rewards",
    "reward.process_bytes": "a process of scorers has at most 8 GiB of memory",
    "rollout.top_p": "the trainer needs the tokens that were left, of which engines name 20; use rollout.truncation",
    "rollout.top_k": "the trainer needs the tokens that were left; use rollout.truncation",
    "trainer.beta1": "AdamW's beta1 is 0.9",
    **dict.fromkeys(
        ("trainer.lora.dora", "trainer.lora.use_dora"),
        "DoRA rescales whole layers, which engines cannot add as B·A; adapters are LoRA, or rsLoRA by rank_stabilized",
    ),
    **dict.fromkeys(
        ("trainer.lora.load_in_4bit", "trainer.lora.load_in_8bit", "trainer.lora.quantization"),
        "QLoRA is not offered: the frozen base is in model.dtype, divided among trainer.ranks",
    ),
    "trainer.checkpoint_async": "training always goes on while a checkpoint is written; leave the key out",
    "queue.consumer_bytes": "256 MiB are kept of trained groups that consumers have not read",
}

# Keys that were removed, with the value that always holds now; complete configs that earlier versions wrote into run
# folders have them.
DROPPED: dict[str, object] = {
    "trainer.attention": "auto",
    "queue.limits": {
        "frame_bytes": 1 << 28,
        "message_bytes": 1 << 29,
        "frames": 4096,
        "clients": 4096,
        "requests_per_s": 5000.0,
    },
    "queue.slack": None,
    "queue.max_lease_s": 14400.0,
    "queue.consumer_bytes": 1 << 28,
    "queue.metrics_port": 0,
    "algorithm.shaping.resample_power": 2.0,
    "algorithm.guard.patience": 3,
    "agent.check_rendering": 0.02,
    "queue.clients": [],
    "algorithm.shaping.max_refills": 64,
    "weight_sync.mismatch.tokens": 32,
    "queue.message_bytes": 1 << 29,
    "reward.process_bytes": 8 << 30,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "trainer.beta1": 0.9,
    "trainer.checkpoint_async": True,
}


def replacement(key: str) -> str | None:
    """Return the end of an error message that says what replaced an old key; None if there never was such a key."""
    if key in ABSENT:
        return f"; {ABSENT[key]}"
    section, rest = key, ""
    while section:
        if section in MOVED:
            return f"; it is now {MOVED[section]}{rest}"
        section, _, leaf = section.rpartition(".")
        rest = f".{leaf}{rest}"
    return None


# Values of verl's policy_loss.loss_mode, its adv_estimator and its types of KL that have other names here.
LOSSES = {"vanilla": "ppo", "geo_mean": "gmpo"}
ADVANTAGES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+"}

_A_BYPASS = "a correction, such as algorithm.correction=bypass_ppo_clip or bypass_pg_is"
_VALUES: dict[str, dict[str, str]] = {
    "algorithm.loss": LOSSES
    | {"bypass_mode": _A_BYPASS, "policy_loss": "ppo", "default": "prime_rl"}
    | dict.fromkeys(("grpo", "bnpo", "dapo", "dr_grpo"), "ppo with an algorithm.aggregation"),
    "algorithm.advantage": ADVANTAGES | {"ppo": "gae with a critic", "gspo": "grpo with algorithm.loss=gspo"},
    "algorithm.correction": {
        "bypass_mode": "bypass_ppo_clip or bypass_pg_is",
        "token": "decoupled_token_is",
        "sequence": "decoupled_seq_is",
        "none": "disabled",
    },
    "algorithm.kl.estimator": ESTIMATORS,
    "algorithm.aggregation": {"seq-mean": "seq-mean-token-mean", "sum": "token-sum", "mean": "token-mean"},
    "trainer.backend": {"fsdp": "fsdp2"},
}

_STEPS = "trainer.steps, as a number of steps"
# Other projects' keys, by the whole name or its last part.
KEYS = {
    "eval.n": "eval.samples",
    "lr": "trainer.learning_rate",
    "n": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "train_batch_size": "data.train_batch_groups",
    "rollout_batch_size": "data.train_batch_groups",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "tensor_model_parallel_size": "rollout.tensor_parallel",
    "adv_estimator": "algorithm.advantage",
    "loss_mode": "algorithm.loss",
    "total_training_steps": "trainer.steps",
    "max_steps": "trainer.steps",
} | dict.fromkeys(("total_epochs", "num_train_epochs"), _STEPS)
# Other sections have keys with the names and meanings of these.
_IN_SECTIONS = ("trainer.learning_rate", "rollout.tensor_parallel")
_VERL_SECTIONS = ("actor_rollout_ref", "custom_reward_function")


def key_hint(key: str, exists: Callable[[str], object]) -> str | None:
    """Return the end of an error message that says what another project's dotted ``key`` is called here.

    If several sections have such a key, the section that was named counts: ``critic.lr`` is ``critic.learning_rate``.
    ``exists`` says whether a key is one of ours.
    """
    if key.partition(".")[0] in _VERL_SECTIONS:
        return "; it is verl's: `rl-async config from-verl` translates its configs"
    *sections, last = key.split(".")
    ours = KEYS.get(key) or KEYS.get(last)
    if ours is None:
        return None
    for depth in range(len(sections) if ours in _IN_SECTIONS else 0, 0, -1):
        near = ".".join([*sections[:depth], ours.rpartition(".")[2]])
        if exists(near):
            return f"; here it is {near}"
    return f"; here it is {ours}"


def hint(key: str, name: str) -> str | None:
    """Return the end of an error message that says what another project's ``name`` is as a value of ``key``."""
    ours = _VALUES.get(key, {}).get(name)
    return None if ours is None else f"; what others call {name} is {ours} here"
