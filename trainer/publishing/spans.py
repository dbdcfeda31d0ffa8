"""The spans of a publication of weights: one trace for each version, with a span below it for each engine's update."""

from collections.abc import Iterator
from contextlib import contextmanager

from rl_async import tracing
from rl_async.messages import Version
from rl_async.tracing import Value
from rl_async.weight_sync.protocol import SyncReport
from rl_async.weight_sync.wave import CUT_OFF

PUBLISH = "publish"
ASLEEP = "asleep"  # the stage of an engine that waits for its trainer


def _trace(version: str) -> str:
    return f"{PUBLISH} {version}"


class Publication:
    """What is told of a publication while it is spanned."""

    def __init__(self, about: dict[str, Value]) -> None:
        self._about = about

    def ended(self, report: SyncReport) -> None:
        """Note its result."""
        self._about |= {
            "rl_async.engines": len(report.engines),
            "rl_async.bytes": report.nbytes,
            "rl_async.pause_s": report.pause_seconds,
        }
        if report.failures:
            self._about |= {"error.type": "engines_cut_off", "rl_async.failures": report.failures}


@contextmanager
def of_publication(version: Version, *, is_first_rank: bool) -> Iterator[Publication]:
    """Span a publication, of which the first rank tells."""
    trace = _trace(str(version)) if is_first_rank else ""
    with tracing.span(trace, PUBLISH, {"rl_async.version": str(version)}, key=PUBLISH, parent="") as about:
        yield Publication(about)


class EngineUpdates:
    """Spans the update of each engine, from its first stage to its last, as the coordinator notes them."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[str, int]] = {}  # version and time, by engine

    def __call__(self, engine: str, version: str, stage: str) -> None:
        """Note that an update of an engine has entered a stage; empty: it is done. An engine that was cut off has
        ended, too."""
        known, began = self._began.get(engine, ("", 0))
        if stage not in ("", ASLEEP, CUT_OFF):
            if known != version:  # what was noted of an older version, as a probe of it, has no end
                self._began[engine] = version, tracing.now()
            return
        self._began.pop(engine, None)
        if stage != ASLEEP and known == version:
            about: dict[str, Value] = {"rl_async.engine": engine, "rl_async.version": version}
            tracing.add(_trace(version), "update engine", began, about, parent=PUBLISH, error=stage)
