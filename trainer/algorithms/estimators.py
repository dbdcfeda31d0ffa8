"""The registry of advantage estimators, and what each needs beside rewards."""

from rl_async.trainer.algorithms.advantages import Advantage
from rl_async.trainer.algorithms.group_advantages import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from rl_async.trainer.algorithms.token_advantages import (
    gae_advantage,
    optimal_token_baseline,
    reinforce_plus_plus,
    tir_optimal_token_baseline,
)
from rl_async.trainer.backends.interface import OutputName

ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae_advantage,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}

LOOKS: dict[str, frozenset[OutputName]] = {
    "optimal_token_baseline": frozenset({"sum_squares"}),
    "tir_optimal_token_baseline": frozenset({"sum_squares"}),
}
