"""Every policy loss and advantage estimator by name, with the traits that the rest of the system has to know.

The formulas themselves are in ``trainer/algorithms/losses.py`` and ``advantages.py``, in tables with the same names;
they need torch, and config checks must not. Checks, derived settings and the trainer read the traits declared here and
never compare names. A user's own function, given as ``path.py:name``, has no traits and is not restricted by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec import Meta

Need = Literal["values", "sum_squares", "greedy", "parts", "reference", "process", "states"]


@dataclass(frozen=True)
class Loss:
    """Traits of a policy loss.

    Attributes:
        uses_ratio: Whether it uses pi_theta / pi_old; pi_old is mu when old log-probabilities are bypassed.
        behaviour: "weighs" if it multiplies by pi_old/mu, "limits" if it bounds pi_old against mu.
        options: Fields of LossOptions that it reads.
        weighs_rows: Whether it multiplies the weights of a row's tokens, so that one of the row would count too often.
        ascending: Pairs of options; the first must be below the second.
    """

    uses_ratio: bool = True
    behaviour: Literal["unused", "weighs", "limits"] = "unused"
    options: tuple[str, ...] = ()
    weighs_rows: bool = False
    ascending: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Advantage:
    """Traits of an advantage estimator.

    Attributes:
        compares_group: Whether it compares the members of a group, so that a group must have at least two.
        needs: Its inputs besides rewards: a critic's ``values``, the ``sum_squares`` of pi_old over the vocabulary, one
            more ``greedy`` episode per group, the ``parts`` of the reward in place of the whole, log-probabilities
            by the ``reference`` model, or by the ``process`` reward model that is trained in the critic's place; the
            ``states`` that turns answer.
        row_is_episode: Whether it compares rows one by one, so that an episode must not become several.
        options: Fields of AdvantageOptions that it reads.
    """

    compares_group: bool = True
    needs: frozenset[Need] = frozenset()
    row_is_episode: bool = False
    options: tuple[str, ...] = ()

    @property
    def needs_contrast(self) -> bool:
        """Whether it learns nothing from a group whose rewards are all equal."""
        return self.compares_group or "greedy" in self.needs


LOSSES: dict[str, Loss] = {
    "ppo": Loss(options=("clip_dual",)),
    "decoupled_ppo": Loss(behaviour="weighs", options=("clip_dual", "decoupled_cap")),
    "reinforce": Loss(uses_ratio=False),
    "gpg": Loss(uses_ratio=False),
    "gspo": Loss(),
    "gmpo": Loss(),
    "sapo": Loss(options=("sapo_tau_positive", "sapo_tau_negative")),
    "cispo": Loss(),
    "dro": Loss(options=("dro_beta",)),
    "dppo_tv": Loss(options=("dppo_tv", "dppo_high", "dppo_cap")),
    "dppo_kl": Loss(options=("dppo_kl", "dppo_high", "dppo_cap")),
    "vespo": Loss(
        options=("vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative"),
        weighs_rows=True,
    ),
    "sppo": Loss(options=("sppo_eta",)),
    "ipo": Loss(options=("ipo", "ipo_penalty")),
    "prime_rl": Loss(options=("dppo_tv", "dppo_high", "dppo_cap", "ipo_penalty")),
    "m2po": Loss(behaviour="limits", options=("m2po",)),
    "clip_cov": Loss(
        options=("clip_dual", "clip_cov_share", "clip_cov_low", "clip_cov_high"),
        ascending=(("clip_cov_low", "clip_cov_high"),),
    ),
    "kl_cov": Loss(options=("kl_cov_share", "kl_cov_coef")),
}

ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(),
    "dr_grpo": Advantage(),
    "max_rl": Advantage(),
    "grpo_passk": Advantage(row_is_episode=True, options=("passk_std",)),
    "gdpo": Advantage(needs=frozenset({"parts"}), options=("gdpo_weights",)),
    "rloo": Advantage(),
    "dpo": Advantage(needs=frozenset({"reference"}), row_is_episode=True, options=("dpo_beta",)),
    "opo": Advantage(),
    "gpg": Advantage(),
    "remax": Advantage(compares_group=False, needs=frozenset({"greedy"}), row_is_episode=True),
    "reinforce_plus_plus": Advantage(compares_group=False, options=("gamma",)),
    "reinforce_plus_plus_baseline": Advantage(),
    "gae": Advantage(
        compares_group=False,
        needs=frozenset({"values"}),
        options=("gamma", "lam", "lam_alpha", "whiten", "bootstrap_cut"),
    ),
    "prime": Advantage(
        needs=frozenset({"process", "reference"}),
        row_is_episode=True,
        options=("gamma", "whiten", "prime_beta", "prime_coef"),
    ),
    "gigpo": Advantage(needs=frozenset({"states"}), options=("gamma", "gigpo_weight", "gigpo_by", "gigpo_std")),
    "optimal_token_baseline": Advantage(needs=frozenset({"sum_squares"}), row_is_episode=True),
    "tir_optimal_token_baseline": Advantage(needs=frozenset({"sum_squares"}), row_is_episode=True),
}


# The inputs that a model of the section `critic` gives.
BY_CRITIC: frozenset[Need] = frozenset({"values", "process"})


def advantage_needs(name: str) -> frozenset[Need]:
    """The estimator's inputs besides rewards. A user's own gets none, since its needs are unknown."""
    return ADVANTAGES.get(name, Advantage()).needs


def loss_option(option: str, text: str) -> Meta:
    """Describe a field of LossOptions: the names of the losses that read it, and ``text``."""
    return _read_by(LOSSES, option, text)


def advantage_option(option: str, text: str) -> Meta:
    """Describe a field of AdvantageOptions: the names of the estimators that read it, and ``text``."""
    return _read_by(ADVANTAGES, option, text)


def _read_by(table: Mapping[str, Loss] | Mapping[str, Advantage], option: str, text: str) -> Meta:
    readers = ", ".join(name for name, traits in table.items() if option in traits.options)
    return Meta(description=f"{readers}: {text}")
