"""Names that users of other projects type for values that are called otherwise here."""

LOSSES = {"vanilla": "ppo", "geo_mean": "gmpo"}  # of verl's policy_loss.loss_mode; its other names are ours
ADVANTAGES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}  # of verl's adv_estimator
ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+"}  # of verl's KL types

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


def hint(key: str, name: str) -> str | None:
    """Return the end of an error message that says what another project's ``name`` is as a value of ``key``."""
    ours = _VALUES.get(key, {}).get(name)
    return None if ours is None else f"; what others call {name} is {ours} here"
