"""The spans of a publication: of the whole by the first rank, and of each engine's update."""

from pathlib import Path
from typing import Any

import pytest

from rl_async import tracing
from rl_async.messages import Version
from rl_async.trainer.publishing import EngineUpdates, of_publication
from rl_async.weight_sync.protocol import SyncReport
from rl_async.weight_sync.wave import CUT_OFF


class FakeSpans:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.added: list[tuple[str, str, str, str]] = []  # trace, name, parent, error
        self.about: list[dict[str, Any]] = []

    def traceparent(self, trace: str, key: str) -> str:
        return f"{trace} {key}"

    def add(
        self, trace: str, name: str, key: str, parent: str, times: tuple[int, int], error: str, about: dict[str, Any]
    ) -> None:
        assert 0 < times[0] <= times[1]
        self.added.append((trace, name, parent, error))
        self.about.append(about)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> FakeSpans:
    fake = FakeSpans()
    monkeypatch.setattr(tracing, "_spans", fake)
    return fake


def report(*failures: str) -> SyncReport:
    return SyncReport(
        version=Version(0, 3),
        seconds=1.0,
        waiting_seconds=0.0,
        pause_seconds=0.5,
        nbytes=7,
        engines=["a"],
        failures=list(failures),
    )


def test_the_first_rank_alone_tells_of_a_publication(spans: FakeSpans) -> None:
    for first in (False, True):
        with of_publication(Version(0, 3), is_first_rank=first) as ended:
            ended(report())
    assert spans.added == [("publish 0.3", "publish", "", "")]
    assert spans.about[0]["rl_async.bytes"] == 7 and spans.about[0]["rl_async.engines"] == 1


def test_a_publication_that_cut_engines_off_has_an_error(spans: FakeSpans) -> None:
    with of_publication(Version(0, 3), is_first_rank=True) as ended:
        ended(report("b failed in resume"))
    assert spans.added[0][3] == "engines_cut_off"


def test_an_update_lasts_from_its_first_stage_to_its_last(spans: FakeSpans, tmp_path: Path) -> None:
    updates = EngineUpdates(tmp_path)
    for engine, version, stage in (
        ("a", "0.2", "probe"),  # not of an update
        ("a", "0.3", "pause"),
        ("b", "0.3", "pause"),
        ("a", "0.3", "update, bucket 1/2"),
        ("a", "0.3", ""),
        ("b", "0.3", "asleep"),  # nothing was updated
        ("b", "0.3", ""),
    ):
        updates(engine, version, stage)
    assert spans.added == [("publish 0.3", "update engine", "publish", "")]
    assert spans.about[0]["rl_async.engine"] == "a"


def test_the_update_of_an_engine_that_is_cut_off_has_an_error(spans: FakeSpans, tmp_path: Path) -> None:
    updates = EngineUpdates(tmp_path)
    for stage in ("pause", "update, bucket 3/9", CUT_OFF):
        updates("a", "0.3", stage)
    assert spans.added == [("publish 0.3", "update engine", "publish", "cut off")]
