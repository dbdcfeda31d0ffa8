"""The routes of the page: its files, and JSON about runs. Only ``diagnosis`` asks a run's processes; it has them write
their stacks if it is asked for them, or if something is silent or late.

GET /open/TOKEN                          sets the cookie and leads to the page
GET /, /app.js, /app.css                 the page
GET /api/runs                            the runs, the newest first
GET /api/runs/RUN/config                 its keys and values
GET /api/runs/RUN/metrics                ?keys=a,b&epoch=E&after=N: columns behind the first N records
GET /api/runs/RUN/evaluations            ?solved=0.5 (or eval.solved): records, and avg@k, pass@k by step and source
GET /api/runs/RUN/compare                ?before=STEP&after=STEP&with=RUN: two evaluations, the other of another run
GET /api/runs/RUN/diagnosis              ?stacks=1: what `rl-async doctor` sees, and the newest weight updates
GET /api/runs/RUN/timeline               ?from=T&to=T: the lanes between two times (Unix), by default the newest steps
GET /api/runs/RUN/choices                the values that filters may take, and how far the index is
GET /api/runs/RUN/trajectories           filters of search.py, order, offset, limit: one page
GET /api/runs/RUN/trajectories/KEY       one trajectory with everything about its tokens
GET /api/runs/RUN/groups/PARTITION-STEP-GROUP  ?sample=N: the conversations of a group, or of one sample
GET /api/events                          server-sent events: what changed in which run
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from rl_async.errors import RequestRefused, UserError
from rl_async.launcher.doctor.diagnosis import diagnose, needs_stacks
from rl_async.launcher.doctor.observe import observe
from rl_async.launcher.folder.token_texts import tokenizer_of
from rl_async.launcher.timeline.updates import newest_updates
from rl_async.launcher.timeline.window import window
from rl_async.launcher.view import evaluation, search
from rl_async.launcher.view.access import OPEN, PageAccess
from rl_async.launcher.view.index import Indexer
from rl_async.launcher.view.numbers import integer, number
from rl_async.launcher.view.recorded import row_at, rows_in
from rl_async.launcher.view.runs import ViewedRun, ViewedRuns
from rl_async.launcher.view.trajectory import story
from rl_async.process.http_server import application

STATIC = Path(__file__).parent / "static"
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
LOOK_S = 1.0  # between two looks at the files of the runs
QUIET_S = 15.0  # after which a stream of events says that it is alive
DIAGNOSIS_S = 1.5  # for which a diagnosis is given again
STACKS_S = 15.0  # for which one is that needed stacks
GROUP = 64  # rows of a group that are shown


class ViewServer:
    """Answers the routes. What reads files runs on threads."""

    def __init__(self, runs: ViewedRuns, access: PageAccess) -> None:
        self._runs, self._access = runs, access
        self._indexer = Indexer()
        self._diagnoses: dict[str, tuple[float, bytes]] = {}
        self._diagnosing = asyncio.Lock()

    def application(self) -> Starlette:
        """Return the application."""
        answers: dict[str, Callable[[ViewedRun, Request], Any]] = {
            "config": lambda run, _: run.config(),
            "metrics": self._metrics,
            "evaluations": self._evaluations,
            "compare": self._compare,
            "choices": self._choices,
            "trajectories": self._trajectories,
            "trajectories/{key}": self._trajectory,
            "groups/{key}": self._group,
            "timeline": _timeline,
        }
        return application(
            {
                f"GET {OPEN}{{token}}": self._open,
                "GET /": self._file,
                "GET /{name}": self._file,
                "GET /api/runs": self._list,
                "GET /api/events": self._events,
                "GET /api/runs/{run}/diagnosis": self._diagnosis,
                **{f"GET /api/runs/{{run}}/{path}": self._on_thread(answer) for path, answer in answers.items()},
            }
        )

    def close(self) -> None:
        """End the thread that indexes."""
        self._indexer.close()

    async def _open(self, request: Request) -> Response:
        response = RedirectResponse("/", 303)
        response.set_cookie(self._access.cookie, self._access.token, httponly=True, samesite="strict")
        return response

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        file = next((file for file in STATIC.iterdir() if file.name == name), None)
        if file is None:
            raise RequestRefused(f"there is no page {name[:100]!r}", code="no_page", status=404)
        return Response(file.read_bytes(), media_type=TYPES[file.suffix[1:]])

    def _on_thread(self, answer: Callable[[ViewedRun, Request], Any]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            return await asyncio.to_thread(on_thread, request)

        def on_thread(request: Request) -> Response:
            run = self._runs.named(request.path_params["run"])
            return _json(answer(run, request))

        return handle

    async def _list(self, request: Request) -> Response:
        def summaries() -> list[dict[str, Any]]:
            found = [_refreshed(run, run.summary) for run in self._runs.all()]
            return sorted(found, key=lambda run: run["evaluates"])  # the page opens the first one

        return _json(await asyncio.to_thread(summaries))

    def _metrics(self, run: ViewedRun, request: Request) -> Any:
        given = request.query_params
        keys = [key for key in given.get("keys", "").split(",") if key]

        def columns() -> dict[str, Any]:
            epoch, after = integer("epoch", given.get("epoch", "-1")), integer("after", given.get("after", "0"))
            return {**run.metrics.since(keys, epoch, max(0, after)), "names": run.metrics.names}

        return _refreshed(run, columns)

    def _evaluations(self, run: ViewedRun, request: Request) -> Any:
        given = request.query_params.get("solved")
        solved = run.solved if given is None else number("solved", given)
        with self._indexer.of(run.folder).connect() as connection:
            table = evaluation.table(connection, solved)
        return {"records": _refreshed(run, run.evaluations.records), "solved": solved, "table": table}

    def _compare(self, run: ViewedRun, request: Request) -> Any:
        before, after = (integer(side, request.query_params.get(side, "")) for side in ("before", "after"))
        other = self._runs.named(request.query_params.get("with") or run.name)
        first, second = (self._indexer.of(one.folder) for one in (run, other))
        with first.connect() as one, second.connect() as two:
            sides = evaluation.recorded(one, run.name, before), evaluation.recorded(two, other.name, after)
            return evaluation.compared(*sides)

    def _choices(self, run: ViewedRun, request: Request) -> Any:
        index = self._indexer.of(run.folder)
        with index.connect() as connection:
            return {
                **search.choices(connection),
                "orders": list(search.ORDERS),
                **index.state(),
            }

    def _trajectories(self, run: ViewedRun, request: Request) -> Any:
        with self._indexer.of(run.folder).connect() as connection:
            return search.find(connection, request.query_params)

    def _trajectory(self, run: ViewedRun, request: Request) -> Any:
        with self._indexer.of(run.folder).connect() as connection:
            found = search.row_of_key(connection, request.path_params["key"])
        row = row_at(run.folder / "trajectories" / found["file"], found["place"])
        step = found["step"] if found["partition"] == "train" else None
        tokenizer = tokenizer_of(run.folder, str(run.config().get("model.path", "")))
        return {**search.listed(found), **story(row, step, tokenizer.decode), "problem": tokenizer.problem}

    def _group(self, run: ViewedRun, request: Request) -> Any:
        partition, *numbers = request.path_params["key"].split("-")
        if len(numbers) != 2:
            raise RequestRefused("a group is PARTITION-STEP-GROUP", code="no_group", status=404)
        sample = request.query_params.get("sample")
        only = None if sample is None else integer("sample", sample)
        with self._indexer.of(run.folder).connect() as connection:
            rows = search.rows_of_group(connection, partition, *(integer("key", part) for part in numbers))
        rows = [row for row in rows if only in (None, row["sample"])][:GROUP]
        read = rows_in(run.folder / "trajectories", [(row["file"], row["place"]) for row in rows])
        return [
            {**search.listed(row), "turns": r.turns, "error_text": r.error} for row, r in zip(rows, read, strict=True)
        ]

    async def _diagnosis(self, request: Request) -> Response:
        run = await asyncio.to_thread(self._runs.named, request.path_params["run"])
        asked = "stacks" in request.query_params
        async with self._diagnosing:  # each asks the queue and all engines of the run
            until, body = self._diagnoses.get(run.name, (0.0, b""))
            if asked or time.monotonic() > until:
                body, lasts = await asyncio.to_thread(_diagnosed, run, asked)
                self._diagnoses[run.name] = time.monotonic() + lasts, body
        return Response(body, media_type="application/json")

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self._changes(), media_type="text/event-stream")

    async def _changes(self) -> AsyncIterator[bytes]:
        """Yield an event for each run that has changed. Waits LOOK_S between looks. Runs until the page is closed."""
        known: dict[str, dict[str, Any]] = {}
        said = time.monotonic()
        while True:
            for state in await asyncio.to_thread(self._states):
                if known.get(state["run"]) != state:
                    known[state["run"]], said = state, time.monotonic()
                    yield b"data: " + msgspec.json.encode(state) + b"\n\n"
            if time.monotonic() - said > QUIET_S:
                said = time.monotonic()
                yield b": alive\n\n"
            await asyncio.sleep(LOOK_S)

    def _states(self) -> list[dict[str, Any]]:
        return [_refreshed(run, partial(self._state, run)) for run in self._runs.all()]

    def _state(self, run: ViewedRun) -> dict[str, Any]:
        """Return what the page follows of a run."""
        summary = run.summary()
        progress = self._indexer.progress(run.folder)
        return {
            "run": run.name,
            "epoch": run.metrics.epoch,
            "count": len(run.metrics.steps),
            "evaluations": len(run.evaluations.records()),
            "indexed": None if progress is None else progress._asdict(),
            "running": summary["running"],
            "problem": summary["problem"],
        }


def _refreshed(run: ViewedRun, look: Callable[[], Any]) -> Any:
    """Read what the run wrote, then look at it."""
    with run.lock:
        run.refresh()
        return look()


def _diagnosed(run: ViewedRun, asked: bool) -> tuple[bytes, float]:
    """Diagnose a run, and say for how long that holds. Stacks are wanted if they are ``asked`` for or say more."""
    updates = newest_updates(run.timeline.read())  # read first: no engine seems behind one that it took since
    try:
        seen = observe(run.folder, stacks=asked)
        wanted = not asked and needs_stacks(seen)
        seen = observe(run.folder) if wanted else seen
    except UserError as error:
        raise RequestRefused(str(error), code="no_diagnosis", status=409) from error
    told = {"verdict": diagnose(seen), "observation": seen, "updates": updates, "at": time.time()}
    return msgspec.json.encode(told), STACKS_S if wanted else DIAGNOSIS_S


def _timeline(run: ViewedRun, request: Request) -> Any:
    given = [request.query_params.get(side) for side in ("from", "to")]
    began, ended = (None if text is None else number("from, to", text) for text in given)
    if began is not None and ended is not None and ended <= began:
        raise RequestRefused("from: it is not before to", code="no_window", param="from")
    return window(run.folder, run.timeline.read(), began, ended)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
