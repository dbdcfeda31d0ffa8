"""Watches how far the data is from the policy, and acts when it is too far. A pure state machine, fed once a step.

A step is in band if ``correction/ess`` is at least ``min_ess`` and ``correction/k3`` at most ``max_kl``. All ranks see
the same metrics, so all decide alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rl_async.configs.schema.algorithm import GuardConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import PolicyDrifted


class Breach(NamedTuple):
    """A metric that is beyond its limit in a step."""

    metric: str
    value: float
    limit: float
    # The config key that sets the limit.
    key: str

    def __str__(self) -> str:
        sign = "<" if self.value < self.limit else ">"
        return f"{self.metric} = {self.value:.4g} {sign} {self.limit:g} (algorithm.guard.{self.key})"


@dataclass(frozen=True)
class GuardAction:
    """What to do after a step: log a warning, and/or set the queue's bound on staleness."""

    warning: str = ""
    # If None, the bound stays as it is.
    max_staleness: int | None = None


# Single steps scatter; three in a row, out of band or back in it, are a trend.
PATIENCE = 3


class Guard:
    """Acts when ``patience`` consecutive steps were out of band.

    ``adapt`` halves the bound on staleness then, and again after every further ``patience`` steps out of band, since
    samples already drawn are still old. It raises the bound by one after every ``patience`` steps in band.
    """

    def __init__(self, config: GuardConfig, max_staleness: int, least: int = 0, patience: int = PATIENCE) -> None:
        """``max_staleness`` is the configured bound; with a bound below ``least`` the run could not continue."""
        self._config, self._configured, self._least = config, max_staleness, min(least, max_staleness)
        self._bound, self._patience = max_staleness, patience
        # The number of consecutive steps out of band.
        self._outside = 0
        self._inside = 0
        self._said_blind = False

    @classmethod
    def of(cls, config: RunConfig) -> "Guard":
        """Build the guard of a run. Weights published every k steps need slots for k batches, a bound of k - 1."""
        return cls(config.algorithm.guard, config.queue.max_staleness, config.weight_sync.every - 1)

    def observe(self, step: int, metrics: Mapping[str, float]) -> GuardAction:
        """Take in a step's metrics. Raises PolicyDrifted if ``action`` is stop and the patience is exhausted.

        A step without the metrics is ignored: it trained no token, or only tokens that were sampled under a grammar's
        mask; the first such step warns.
        """
        if self._config.action == "off":
            return GuardAction()
        if "correction/ess" not in metrics:
            return self._blind(step, metrics)
        breaches = self._breaches(metrics)
        if not breaches:
            return self._in_band()
        self._inside = 0
        self._outside += 1
        what = f"step {step}, out of band for {self._outside} consecutive steps: {'; '.join(map(str, breaches))}"
        if self._config.action == "stop" and self._outside >= self._patience:
            raise PolicyDrifted(
                f"{what}. The data is too far from the policy: lower queue.max_staleness or trainer.learning_rate, or "
                "check that engines and trainer compute the same log-probabilities"
            )
        warning = f"off-policy: {what}" if self._outside == self._patience else ""
        if self._config.action == "adapt" and self._outside % self._patience == 0:
            return self._set_bound(max(self._bound // 2, self._least), warning)
        return GuardAction(warning)

    def _blind(self, step: int, metrics: Mapping[str, float]) -> GuardAction:
        if self._said_blind or "constrained/share" not in metrics:
            return GuardAction()
        self._said_blind = True
        return GuardAction(
            f"step {step}: algorithm.guard sees nothing, since all tokens were sampled under a JSON format's mask; "
            "later steps will not say so"
        )

    def _in_band(self) -> GuardAction:
        self._outside = 0
        self._inside += 1
        if self._config.action == "adapt" and self._inside % self._patience == 0:
            return self._set_bound(min(self._bound + 1, self._configured), "")
        return GuardAction()

    def _set_bound(self, max_staleness: int, warning: str) -> GuardAction:
        if max_staleness == self._bound:
            return GuardAction(warning)
        self._bound = max_staleness
        return GuardAction(warning, max_staleness)

    def _breaches(self, metrics: Mapping[str, float]) -> list[Breach]:
        found = []
        # Negated, so that NaN is out of band.
        if not metrics["correction/ess"] >= self._config.min_ess:
            found.append(Breach("correction/ess", metrics["correction/ess"], self._config.min_ess, "min_ess"))
        if not metrics["correction/k3"] <= self._config.max_kl:
            found.append(Breach("correction/k3", metrics["correction/k3"], self._config.max_kl, "max_kl"))
        return found
