"""Losses whose every token stands for itself. w is the correction's weight, r = pi_theta / pi_old, A the advantage."""

import torch
from torch import Tensor

from rl_async.trainer.algorithms.correction import LOG_RATIO_LIMIT
from rl_async.trainer.algorithms.loss_inputs import LossInputs


def ppo(x: LossInputs) -> Tensor:
    """-w min(r A, clip(r, 1 - low, 1 + high) A), and with ``clip_dual`` c at most -w c A where A < 0, [B, T].

    Sources: PPO (arXiv:1707.06347), eq. 7; clip-higher: DAPO (arXiv:2503.14476), eq. 10; dual clip:
    arXiv:1912.09729.
    """
    surrogate = torch.minimum(x.ratio * x.advantages, x.clip(x.ratio) * x.advantages)
    dual = x.options.loss_options.clip_dual
    if dual is not None:
        surrogate = torch.where(x.advantages < 0, torch.maximum(surrogate, dual * x.advantages), surrogate)
    return -x.weights * surrogate


def decoupled_ppo(x: LossInputs) -> Tensor:
    """-b min(r A, clip(r) A) with the behaviour weight b = pi_old / mu, 0 where it is above ``decoupled_cap``, [B, T].

    The clip is around the proximal policy, the weight outside. Sources: Hilton et al. (arXiv:2110.00641), eq. 4, as
    AReaL (arXiv:2505.24298) uses it, with its cap on b. It weighs by itself: no correction beside it may.
    """
    behaviour = (x.proximal - x.behaviour).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    behaviour = torch.where(behaviour <= x.options.loss_options.decoupled_cap, behaviour, 0.0)
    return behaviour * ppo(x)


def reinforce(x: LossInputs) -> Tensor:
    """-w A log pi_theta, no ratio, [B, T]. Source: Williams 1992."""
    return -x.weights * x.advantages * x.logprobs


def cispo(x: LossInputs) -> Tensor:
    """-w sg(clip(r, 1 - low, 1 + high)) A log pi_theta: no token loses its gradient, its weight is clipped, [B, T].

    Source: MiniMax-M1 (arXiv:2506.13585), eqs. 4 and 5; there without a lower bound, which is ``clip_low=1`` here.
    """
    return -x.weights * x.clip(x.ratio).detach() * x.advantages * x.logprobs


def sapo(x: LossInputs) -> Tensor:
    """-w (4 / tau) sigmoid(tau (r - 1)) A, a soft gate in place of a clip, [B, T]; tau_negative where A <= 0.

    Source: SAPO (arXiv:2511.20347). On-policy its gradient is that of r A.
    """
    options = x.options.loss_options
    tau = torch.full_like(x.advantages, options.sapo_tau_negative)
    tau = torch.where(x.advantages > 0, options.sapo_tau_positive, tau)
    return -x.weights * (4 / tau) * torch.sigmoid(tau * (x.ratio - 1)) * x.advantages


def dro(x: LossInputs) -> Tensor:
    """-w (A log pi_theta - beta / 2 (log r)^2): a quadratic penalty in place of a clip, [B, T].

    Direct reward optimisation (arXiv:2405.19107) with the advantage for r - V, multiplied out, without the
    constant: the per-token form that verl and others call `dro`. beta is ``dro_beta``.
    """
    penalty = 0.5 * x.options.loss_options.dro_beta * x.log_ratio**2
    return -x.weights * (x.advantages * x.logprobs - penalty)
