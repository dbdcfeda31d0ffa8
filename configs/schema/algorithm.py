"""The objective: which advantage, loss, correction and regularisation, and their numbers."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl_async.configs.base import Config, Count, Fraction, Positive, doc
from rl_async.configs.schema.correction import CorrectionOptions
from rl_async.configs.schema.formulas import ADVANTAGES, LOSSES, advantage_option, loss_option

ADAPTIVE_LIMIT = 0.2  # of the adaptive KL coefficient: largest relative error that counts

AboveZero = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


class AdvantageOptions(Config, frozen=True):
    """Numbers of the advantage estimators, each read by those that declare it in ``formulas.py``."""

    gamma: Annotated[Fraction, advantage_option("gamma", "discount per token.")] = 1.0
    lam: Annotated[Fraction, advantage_option("lam", "lambda.")] = 1.0
    whiten: Annotated[bool, advantage_option("whiten", "mean 0 and variance 1 over the batch's sampled tokens.")] = True
    bootstrap_cut: Annotated[
        bool,
        advantage_option(
            "bootstrap_cut", "rows that a limit on tokens or turns cut go on: the critic's last value follows, not 0."
        ),
    ] = False
    passk_std: Annotated[bool, advantage_option("passk_std", "divide by the group's standard deviation.")] = True
    gdpo_weights: Annotated[
        dict[str, float],
        advantage_option("gdpo_weights", "factor per part of the reward; its weight in reward.functions if not named."),
    ] = msgspec.field(default_factory=dict)


class LossOptions(Config, frozen=True):
    """Numbers of the losses, each read by those that declare it in ``formulas.py``."""

    clip_dual: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        loss_option("clip_dual", "dual clip, the bound c of -c A for A < 0."),
    ] = None
    decoupled_cap: Annotated[AboveZero, loss_option("decoupled_cap", "tokens with a larger pi_old/mu count 0.")] = 5.0
    sapo_tau_positive: Annotated[AboveZero, loss_option("sapo_tau_positive", "steepness where A > 0.")] = 1.0
    sapo_tau_negative: Annotated[AboveZero, loss_option("sapo_tau_negative", "steepness where A <= 0.")] = 1.05
    dro_beta: Annotated[AboveZero, loss_option("dro_beta", "weight of the quadratic penalty.")] = 0.1
    dppo_tv: Annotated[AboveZero, loss_option("dppo_tv", "largest total variation on a token.")] = 0.2
    dppo_kl: Annotated[AboveZero, loss_option("dppo_kl", "largest KL on a token.")] = 0.05
    dppo_high: Annotated[
        AboveZero | None, loss_option("dppo_high", "limit where A > 0, in place of dppo_tv or dppo_kl; null: no other.")
    ] = None
    ipo: Annotated[AboveZero, loss_option("ipo", "largest change of a token's probability.")] = 0.1
    ipo_penalty: Annotated[NotNegative, loss_option("ipo_penalty", "weight of (log r)^2, on every token.")] = 1e-3
    m2po: Annotated[AboveZero, loss_option("m2po", "budget for the mean of (log pi_old/mu)^2.")] = 0.04
    clip_cov_share: Annotated[Fraction, loss_option("clip_cov_share", "share of tokens held back.")] = 2e-4
    clip_cov_low: Annotated[float, loss_option("clip_cov_low", "covariance above which a token may be held back.")] = (
        1.0
    )
    clip_cov_high: Annotated[float, loss_option("clip_cov_high", "and below which.")] = 5.0
    kl_cov_share: Annotated[Fraction, loss_option("kl_cov_share", "share of tokens with a penalty.")] = 2e-4
    kl_cov_coef: Annotated[NotNegative, loss_option("kl_cov_coef", "weight of |log r| on them.")] = 1.0


class KlConfig(Config, frozen=True):
    """Distance to a reference model."""

    coef: Annotated[float, Meta(ge=0, description="Weight of the KL; 0: no reference model.")] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "full"],
        doc("Estimator of KL(pi || reference) per token; full needs both logits; + : k2's gradient."),
    ] = "k3"
    place: Annotated[Literal["loss", "reward"], doc("Added to the loss, or taken from each token's reward.")] = "loss"
    controller: Annotated[Literal["fixed", "adaptive"], doc("adaptive: coef follows `target`.")] = "fixed"
    target: Annotated[float, Meta(gt=0, description="adaptive: wanted KL per token.")] = 0.01
    horizon: Annotated[Positive, doc("adaptive: time constant, in trajectories.")] = 10_000
    reference_path: Annotated[str | None, doc("Reference model; null: model.path.")] = None


class ShapingConfig(Config, frozen=True):
    """What happens to rewards and groups before advantages are computed."""

    dynamic_sampling: Annotated[
        bool, doc("Groups whose scored rewards are all equal are given up, and other tasks take their places (DAPO).")
    ] = False
    max_refills: Annotated[
        Positive,
        doc(
            "dynamic_sampling: groups given up per batch, on average; after that, groups without signal are accepted. "
            "Every batch adds this many to an allowance of at most max_staleness + 1 times as many."
        ),
    ] = 64
    overlong_max_tokens: Annotated[
        Positive | None, doc("Sampled tokens of an episode from which on the overlong penalty is whole; null: none.")
    ] = None
    overlong_cache_tokens: Annotated[
        Positive, doc("The penalty grows linearly over this many tokens before overlong_max_tokens.")
    ] = 64
    overlong_factor: Annotated[float, Meta(gt=0, description="The whole penalty, taken from the reward.")] = 1.0
    overlong_filter: Annotated[
        bool,
        doc("Trajectories that were cut off (length, timeout) count in their group and do not train themselves."),
    ] = False
    reward_scale: Annotated[
        Literal["none", "batch_std"], doc("batch_std: divide by the standard deviation of the batch's scored outcomes.")
    ] = "none"
    reward_clip: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc("Outcome rewards are clipped to [-reward_clip, reward_clip], last of all."),
    ] = None
    resample: Annotated[
        Literal["none", "pow", "max_min", "max_random"],
        doc(
            "PF-PPO: the batch's rows are drawn again with replacement. pow: by |reward|^resample_power; max_min: only "
            "the best and worst; max_random: the best four times as often as others."
        ),
    ] = "none"
    resample_power: Annotated[float, Meta(gt=0, description="pow: the exponent.")] = 2.0


class GuardConfig(Config, frozen=True):
    """Watches how far the data is from the policy."""

    action: Annotated[
        Literal["off", "warn", "stop", "adapt"],
        doc(
            "When out of band: warn logs it, stop ends the run, adapt halves the staleness that the queue admits for, "
            "and gives it back step by step once back in band."
        ),
    ] = "warn"
    min_ess: Annotated[Fraction, doc("Smallest correction/ess, the tokens' effective share.")] = 0.3
    max_kl: Annotated[float, Meta(gt=0, description="Largest correction/k3: estimate of KL(mu || pi) per token.")] = 0.3
    patience: Annotated[Positive, doc("Steps in a row, out of band or back in it, before it acts.")] = 3


class AlgorithmConfig(Config, frozen=True):
    """The whole objective, by the names of its parts."""

    advantage: Annotated[str, doc(f"Advantage estimator: {', '.join(ADVANTAGES)}, or your own as path.py:name.")] = (
        "grpo"
    )
    loss: Annotated[str, doc(f"Policy loss: {', '.join(LOSSES)}, or your own as path.py:name.")] = "ppo"
    correction: Annotated[str, doc("Off-policy correction: a preset; correction_options changes its values.")] = (
        "decoupled_token_is"
    )
    correction_options: Annotated[CorrectionOptions, doc("Changes to the correction's preset.")] = CorrectionOptions()
    aggregation: Annotated[Aggregation, doc("How token losses become one number, over the global mini-batch.")] = (
        "token-mean"
    )
    clip_low: Annotated[float, Meta(gt=0, le=1, description="Ratio is clipped below 1 - clip_low.")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="Ratio is clipped above 1 + clip_high.")] = 0.28
    entropy_coef: Annotated[float, Meta(ge=0, description="Weight of the entropy bonus.")] = 0.0
    advantage_options: AdvantageOptions = AdvantageOptions()
    loss_options: LossOptions = LossOptions()
    kl: KlConfig = KlConfig()
    shaping: ShapingConfig = ShapingConfig()
    guard: GuardConfig = GuardConfig()


class CriticConfig(Config, frozen=True):
    """The critic: a model of the expected return, for advantages that need one.

    What is not here (AdamW's betas and weight decay, mini-batches) is taken from the trainer's section.
    """

    path: Annotated[
        str | None,
        doc("Model that the critic starts from, or the `critic` folder of a checkpoint; null: model.path."),
    ] = None
    shared: Annotated[
        bool, doc("A value head on the policy's own backbone, trained with it by one loss, instead of a second model.")
    ] = False
    value_coef: Annotated[float, Meta(gt=0, description="shared: weight of the value loss beside the policy's.")] = 0.5
    clip: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc("Values that moved further than this within a step get no gradient; in units of reward; null: off."),
    ] = 0.5
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW; shared: the trainer's.")] = (
        1e-5
    )
    schedule: Annotated[Literal["constant", "linear", "cosine"], doc("As trainer.schedule; shared: the trainer's.")] = (
        "constant"
    )
    lr_warmup_steps: Annotated[Count, doc("Optimizer steps of linear warm-up; shared: the trainer's.")] = 0
    grad_clip: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this; shared: the trainer's.")] = (
        1.0
    )
    warmup_steps: Annotated[Count, doc("Trainer steps, from the run's first, in which only the critic trains.")] = 0
