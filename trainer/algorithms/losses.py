"""The registry of policy losses."""

from rl_async.trainer.algorithms.covariance_losses import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from rl_async.trainer.algorithms.loss_inputs import PolicyLoss
from rl_async.trainer.algorithms.sequence_losses import gmpo, gspo
from rl_async.trainer.algorithms.token_losses import cispo, decoupled_ppo, dro, ppo, reinforce, sapo
from rl_async.trainer.algorithms.trust_region_losses import dppo_kl, dppo_tv, ipo, m2po, select_m2po

LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo),
    "decoupled_ppo": PolicyLoss(decoupled_ppo),
    "reinforce": PolicyLoss(reinforce),
    "gpg": PolicyLoss(reinforce),  # GPG (arXiv:2504.02546) is the plain gradient; its own part is the advantage
    "gspo": PolicyLoss(gspo),
    "gmpo": PolicyLoss(gmpo),
    "sapo": PolicyLoss(sapo),
    "cispo": PolicyLoss(cispo),
    "dro": PolicyLoss(dro),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "ipo": PolicyLoss(ipo),
    "m2po": PolicyLoss(m2po, select_m2po),
    "clip_cov": PolicyLoss(clip_cov, select_clip_cov),
    "kl_cov": PolicyLoss(kl_cov, select_kl_cov),
}
