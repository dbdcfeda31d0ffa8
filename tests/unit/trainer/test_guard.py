"""The guard: patience, one warning per excursion, stop with a named error, halving and giving back."""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest

from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import GuardConfig
from rl_async.errors import PolicyDrifted
from rl_async.trainer.guard import Guard, GuardAction
from rl_async.trainer.run import Run

IN = {"correction/ess": 0.9, "correction/k3": 0.01}
LOW_ESS = {"correction/ess": 0.1, "correction/k3": 0.01}
HIGH_KL = {"correction/ess": 0.9, "correction/k3": 0.5}


def observe(guard: Guard, steps: Iterable[dict[str, float]]) -> list[GuardAction]:
    return [guard.observe(number, metrics) for number, metrics in enumerate(steps)]


def config(action: str, **changes: float) -> GuardConfig:
    return GuardConfig(**({"action": action, "min_ess": 0.3, "max_kl": 0.3} | changes))


def test_a_warning_comes_once_per_excursion_and_only_after_patience() -> None:
    steps = [LOW_ESS, IN, LOW_ESS, HIGH_KL, LOW_ESS, LOW_ESS, IN, HIGH_KL, HIGH_KL]
    verdicts = observe(Guard(config("warn"), 4, patience=2), steps)
    assert [bool(verdict.warning) for verdict in verdicts] == [False, False, False, True, *[False] * 4, True]
    assert all(verdict.max_staleness is None for verdict in verdicts)
    assert "correction/k3 = 0.5 > 0.3 (algorithm.guard.max_kl)" in verdicts[3].warning
    assert "step 3" in verdicts[3].warning


def test_that_it_sees_nothing_is_said_once() -> None:
    json_only, nothing = {"constrained/share": 1.0}, {"loss/policy": 0.0}
    steps = [nothing, IN | {"constrained/share": 0.5}, json_only, IN, json_only]
    verdicts = observe(Guard(config("warn"), 4, patience=2), steps)
    assert [bool(verdict.warning) for verdict in verdicts] == [False, False, True, False, False]
    assert observe(Guard(config("off"), 4, patience=2), [json_only]) == [GuardAction()]


def test_off_sees_nothing() -> None:
    assert observe(Guard(config("off"), 4, patience=2), [LOW_ESS] * 9) == [GuardAction()] * 9


def test_stop_raises_after_patience_naming_metric_value_limit_and_step() -> None:
    guard = Guard(config("stop"), 4, patience=2)
    observe(guard, [LOW_ESS, IN, LOW_ESS])
    with pytest.raises(PolicyDrifted, match=r"step 3\b.*correction/ess = 0\.1 < 0\.3 .*algorithm\.guard\.min_ess"):
        guard.observe(3, LOW_ESS)


def test_limits_are_in_band_and_not_a_number_is_not() -> None:
    guard = Guard(config("stop"), 4, patience=1)
    observe(guard, [{"correction/ess": 0.3, "correction/k3": 0.3}, {"loss/policy": 1.0}])
    with pytest.raises(PolicyDrifted, match="k3 = nan"):
        guard.observe(2, {"correction/ess": 0.5, "correction/k3": math.nan})


def test_adapt_halves_while_out_of_band_and_gives_back_step_by_step() -> None:
    verdicts = observe(Guard(config("adapt"), 4, patience=2), [*[LOW_ESS] * 7, *[IN] * 11])
    wanted = {step: verdict.max_staleness for step, verdict in enumerate(verdicts) if verdict.max_staleness is not None}
    assert wanted == {1: 2, 3: 1, 5: 0, 8: 1, 10: 2, 12: 3, 14: 4}
    assert [step for step, verdict in enumerate(verdicts) if verdict.warning] == [1]


def test_adapt_starts_counting_again_after_a_step_on_the_other_side() -> None:
    verdicts = observe(Guard(config("adapt"), 4, patience=2), [LOW_ESS, LOW_ESS, IN, LOW_ESS, IN, IN, HIGH_KL])
    assert [verdict.max_staleness for verdict in verdicts] == [None, 2, None, None, None, 3, None]


class Source:
    """Remembers the bounds that the queue was asked for."""

    def __init__(self) -> None:
        self.bounds: list[int] = []

    def tighten(self, max_staleness: int) -> None:
        self.bounds.append(max_staleness)


@pytest.mark.parametrize(("rank", "bounds"), [(0, [2, 1]), (1, [])])
def test_only_rank_0_asks_the_queue_and_warns(rank: int, bounds: list[int], caplog: pytest.LogCaptureFixture) -> None:
    run = SimpleNamespace(rank=rank, guard=Guard(config("adapt"), 4, patience=2), source=Source())
    for step in range(4):
        Run.watch(cast(Run, run), step, LOW_ESS)
    assert run.source.bounds == bounds
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (rank == 0) and all("correction/ess" in warning for warning in warnings)


def test_adapt_leaves_the_slots_that_rare_publication_needs() -> None:
    run = load_config(
        "calculator",
        ["queue.max_staleness=4", "weight_sync.every=3", "algorithm.guard.action=adapt"],
    )
    wanted = [verdict.max_staleness for verdict in observe(Guard.of(run), [LOW_ESS] * 5)]
    assert wanted == [None, None, 2, None, None]
