"""Watches how far the data is from the policy, and says what to do about it. A pure state machine, fed once a step.

In band: ``correction/ess`` is at least ``min_ess`` and ``correction/k3`` at most ``max_kl``. All ranks see the same
metrics, so all come to the same verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rl_async.configs.schema.algorithm import GuardConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import PolicyDrifted


class Breach(NamedTuple):
    """One metric beyond its limit."""

    metric: str
    value: float
    limit: float
    key: str  # of the config, that sets the limit

    def __str__(self) -> str:
        sign = "<" if self.value < self.limit else ">"
        return f"{self.metric} = {self.value:.4g} {sign} {self.limit:g} (algorithm.guard.{self.key})"


@dataclass(frozen=True)
class GuardAction:
    """What to do after a step: a warning to log, or a bound on staleness to ask the queue for."""

    warning: str = ""
    max_staleness: int | None = None  # None: nothing new to ask for


class Guard:
    """Acts when ``patience`` steps in a row were out of band, an excursion that ends with the first step back in band.

    adapt halves the wanted staleness then, and again after every further ``patience`` steps of the excursion, since
    what is sampled already is still old; it gives back one step of staleness after every ``patience`` steps in band.
    """

    def __init__(self, config: GuardConfig, max_staleness: int, least: int = 0) -> None:
        """``max_staleness`` is the configured bound; below ``least`` the run could not go on."""
        self._config, self._configured, self._least = config, max_staleness, min(least, max_staleness)
        self._wanted = max_staleness
        self._outside = 0  # steps in a row
        self._inside = 0

    @classmethod
    def of(cls, config: RunConfig) -> "Guard":
        """The run's guard. Weights published every k steps need slots for k batches, a bound of k - 1."""
        return cls(config.algorithm.guard, config.queue.max_staleness, config.weight_sync.every - 1)

    def observe(self, step: int, metrics: Mapping[str, float]) -> GuardAction:
        """Take in a step's metrics. Raises PolicyDrifted if the guard is to stop the run and its patience is over.

        A step without the metrics, which trained no token, says nothing.
        """
        if self._config.action == "off" or "correction/ess" not in metrics:
            return GuardAction()
        breaches = self._breaches(metrics)
        if not breaches:
            return self._in_band()
        self._inside = 0
        self._outside += 1
        what = f"step {step}, {self._outside} steps in a row: {'; '.join(map(str, breaches))}"
        if self._config.action == "stop" and self._outside >= self._config.patience:
            raise PolicyDrifted(
                f"{what}; the data is too far from the policy: lower queue.max_staleness or trainer.learning_rate, or "
                "check that engines and trainer compute the same log-probabilities"
            )
        warning = f"off-policy: {what}" if self._outside == self._config.patience else ""
        if self._config.action == "adapt" and self._outside % self._config.patience == 0:
            return self._want(max(self._wanted // 2, self._least), warning)
        return GuardAction(warning)

    def _in_band(self) -> GuardAction:
        self._outside = 0
        self._inside += 1
        if self._config.action == "adapt" and self._inside % self._config.patience == 0:
            return self._want(min(self._wanted + 1, self._configured), "")
        return GuardAction()

    def _want(self, max_staleness: int, warning: str) -> GuardAction:
        if max_staleness == self._wanted:
            return GuardAction(warning)
        self._wanted = max_staleness
        return GuardAction(warning, max_staleness)

    def _breaches(self, metrics: Mapping[str, float]) -> list[Breach]:
        found = []
        if not metrics["correction/ess"] >= self._config.min_ess:  # so that not-a-number is out of band
            found.append(Breach("correction/ess", metrics["correction/ess"], self._config.min_ess, "min_ess"))
        if not metrics["correction/k3"] <= self._config.max_kl:
            found.append(Breach("correction/k3", metrics["correction/k3"], self._config.max_kl, "max_kl"))
        return found
