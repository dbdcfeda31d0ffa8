"""Serves the page on runs, its files and JSON (``rl-async view``), and writes it with a run into one file (``report``).

The printed address contains a token and sets a cookie, so that no link or history entry of the page has the token. As
on every server of a run, a request must use an allowed host name, which stops DNS rebinding, and have no ``Origin``,
except that the page itself, whose origin is that host, may talk to a run's policy.
Only ``diagnosis`` contacts a run's processes; it has them write their stacks on request, or if a process is silent or
late. A report contains the page's script and style, and a policy with their hashes lets nothing else run or load. Its
data is JSON without any ``<``.

GET /open/TOKEN                          sets the cookie and leads to the page
GET /, /app.js, /app.css                 the page
GET /api/runs                            the runs, the newest first
GET /api/runs/RUN/config                 its keys and values
GET /api/runs/RUN/metrics                ?keys=a,b&epoch=E&after=N: columns behind the first N records
GET /api/runs/RUN/evaluations            ?solved=0.5 (or eval.solved): records, and avg@k, pass@k by step and source
GET /api/runs/RUN/compare                ?before=STEP&after=STEP&with=RUN: two evaluations, the other of another run
GET /api/runs/RUN/diagnosis              ?stacks=1: what `rl-async doctor` sees, and the newest weight updates
GET /api/runs/RUN/timeline               ?from=T&to=T: the lanes between two times (Unix), by default the newest steps
GET /api/runs/RUN/choices                the values that filters may take, and the progress of the index
GET /api/runs/RUN/trajectories           filters of index.py, order, offset, limit: one page
GET /api/runs/RUN/trajectories/KEY       one trajectory with everything about its tokens
GET /api/runs/RUN/trajectories/KEY/SHA   an image that it shows, by its SHA-256
GET /api/runs/RUN/groups/PARTITION-STEP-GROUP  ?sample=N: the conversations of a group, or of one sample
GET /api/events                          server-sent events: the new state of each run that changed
POST /api/runs/RUN/chat                  {conversation, text}: the parts of an answer of the run's policy, lines of JSON
"""

import asyncio
import base64
import hashlib
import math
import re
import secrets
import signal
import sqlite3
import sys
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from rl_async.configs.load import leaves
from rl_async.errors import RequestRefused, UserError
from rl_async.files import UNDECODABLE
from rl_async.insight.diagnosis import diagnose, needs_stacks
from rl_async.insight.doctor import evaluates_only, is_recorded, launcher_of, observe
from rl_async.insight.tail import LineTail
from rl_async.insight.timeline import newest_updates, window
from rl_async.insight.view import index
from rl_async.insight.view.index import Indexer, TrajectoryIndex, integer, number
from rl_async.insight.view.trajectories import TokenTexts, row_at, rows_in, story, tokenizer_of
from rl_async.process.http_auth import Access, App, Headers, Receive, Scope, Send
from rl_async.process.http_server import application, read_body, server_of
from rl_async.process.role import bind, heeded, watch_lifeline
from rl_async.process.run_files import ProcessRecord, TimelineReader, read_roster
from rl_async.recording import read_images
from rl_async.transfer_queue.images import mime_of

# JSON's numbers are read as floats, which hold whole numbers below this one exactly.
MOST_STEPS = 1 << 53
Record = Mapping[str, float | None]


class StepRecords:
    """Reads the records added to a file since the last call, also when another file has replaced it.

    ``key`` names the metric with a record's step. Invalid lines are left out; ``problem`` describes the last one.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key, self._tail = path, key, LineTail(path)
        self.problem = ""

    def read(self) -> list[tuple[int, Record]]:
        """Return the new records with their steps, oldest first; none while the file does not exist."""
        found, problem, replacements = [], "", self._tail.replacements
        for line in self._tail.each():
            try:
                record = msgspec.json.decode(line, type=Record)
                step = record.get(self._key)
                if step is None or not 0 <= step < MOST_STEPS:
                    raise ValueError(f"{self._key} is no step: {step}")
                found.append((int(step), record))
            except (*UNDECODABLE, ValueError) as error:
                problem = f"{self._path}, line {self._tail.count}: {error}"
        if problem or self._tail.replacements > replacements:
            self.problem = problem
        return found


class MetricColumns:
    """One number per step and metric, 8 bytes each; NaN where a step lacks a metric.

    After a resume, steps are trained again: the newest record of a step counts, and records of later steps are dropped.
    ``epoch`` counts such resumes, so that a reader that kept a part knows when to read everything again.
    """

    def __init__(self, path: Path) -> None:
        self.records = StepRecords(path, "step")
        self.epoch = 0
        self.steps = array("q")
        # Columns by name, in the order of their first appearance.
        self.columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Read the new records of the file."""
        for step, record in self.records.read():
            if self.steps and step <= self.steps[-1]:
                kept = bisect_left(self.steps, step)
                del self.steps[kept:]
                for column in self.columns.values():
                    del column[kept:]
                self.epoch += 1
            before = len(self.steps)
            self.steps.append(step)
            for name, value in record.items():
                column = self.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (before - len(column)))
                column.append(math.nan if value is None else value)

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric, or None if no step has it."""
        return next((value for value in reversed(self.columns.get(name, ())) if math.isfinite(value)), None)

    def since(self, names: Iterable[str], epoch: int, after: int) -> dict[str, Any]:
        """Return the columns ``names`` after the first ``after`` records, or all records if the epoch has changed.

        A value that a step lacks, or that is not finite, is null.
        """
        begin = after if epoch == self.epoch and after <= len(self.steps) else 0
        return {
            "epoch": self.epoch,
            "begin": begin,
            "count": len(self.steps),
            "steps": list(self.steps[begin:]),
            "columns": {name: self._part(name, begin) for name in names if name in self.columns},
        }

    def _part(self, name: str, begin: int) -> Sequence[float | None]:
        values = [value if math.isfinite(value) else None for value in self.columns[name][begin:]]
        return values + [None] * (len(self.steps) - begin - len(values))


CONFIG = "config.yaml"


class ViewedRun:
    """One run folder. ``refresh`` reads new records; other methods only use records that were read.

    Methods may be called on several threads, one at a time: hold ``lock``.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        self.metrics = MetricColumns(folder / "metrics.jsonl")
        self._evaluations = StepRecords(folder / "evaluations.jsonl", "eval/step")
        # The newest record of each evaluated step.
        self._evaluated: dict[int, Record] = {}
        # May be used without the lock.
        self.timeline = TimelineReader(folder)
        self._config: tuple[int, dict[str, Any], str] = (-1, {}, "")
        # The reason if the last refresh failed.
        self._unread = ""

    def refresh(self) -> None:
        """Read the run's new records. Unreadable files are reported by ``problem``."""
        self._unread = ""
        try:
            self.metrics.refresh()
            self._evaluated.update(self._evaluations.read())
        except OSError as error:
            self._unread = str(error)

    @property
    def problem(self) -> str:
        """The unreadable files of the run, with the reasons; empty if all can be read."""
        found = (self._read_config()[2], self._unread, self.metrics.records.problem, self._evaluations.problem)
        return "; ".join(filter(None, found))

    def evaluations(self) -> list[Record]:
        """Return the records of the run's evaluations, ordered by step."""
        return [self._evaluated[step] for step in sorted(self._evaluated)]

    def config(self) -> dict[str, Any]:
        """Return the keys and values of the run's config, such as ``trainer.steps``.

        Values are not checked, so that runs of other versions can be shown too; empty if the file cannot be read.
        """
        return self._read_config()[1]

    @property
    def solved(self) -> float:
        """The least reward of a held-out episode that passes: the run's ``eval.solved``, or 1 if that is not set."""
        solved = self.config().get("eval.solved", 1.0)
        return float(solved) if isinstance(solved, int | float) else 1.0

    def _read_config(self) -> tuple[int, dict[str, Any], str]:
        """Return the modification time of the config, its keys and values, and the reason if it cannot be read."""
        file = self.folder / CONFIG
        try:
            changed = file.stat().st_mtime_ns
            if self._config[0] != changed:
                self._config = changed, *_parsed(file)
        except OSError as error:
            self._config = -1, {}, str(error)
        return self._config

    def summary(self) -> dict[str, Any]:
        """Return the run's entry in the list of runs."""
        config, steps = self.config(), self.metrics.steps
        evaluations = self.evaluations()
        wanted, done = config.get("trainer.steps", 0), steps[-1] + 1 if steps else 0
        roles = [record.role for record in _roster(self.folder)]
        # An evaluation of a served model has no processes.
        evaluates = evaluates_only(roles) or "eval.endpoint.url" in config
        running, began = launcher_of(self.folder) is not None, _changed(self)
        # Times of steps and evaluations, of which a resumed run has some before its config was written again.
        known = [*self._times(), *([time.time()] if running else [])]
        return {
            "name": self.name,
            "folder": str(self.folder),
            "mode": config.get("mode", ""),
            "model": config.get("model.path", ""),
            "evaluates": evaluates,
            "steps": 0 if evaluates else wanted,
            "steps_done": done,
            "data": _named(config.get("data.path")),
            "algorithm": ", ".join(str(config[key]) for key in ALGORITHM if config.get(key)),
            "commit": self._commit(),
            "started": min(known, default=began) if began else None,
            "ended": max(known, default=None),
            "running": running,
            "finished": is_recorded(self.folder) if evaluates else bool(wanted) and done >= wanted,
            "began": began,
            "reward": self.metrics.last("reward/mean"),
            "evaluation": evaluations[-1].get("eval/reward") if evaluations else None,
            "trajectories": (self.folder / "trajectories").is_dir(),
            "problem": self.problem,
        }

    def _times(self) -> list[float]:
        """Return the Unix times of the first and the last step that was trained, as far as they are recorded."""
        column = [at for at in self.metrics.columns.get("time", ()) if math.isfinite(at)]
        if not column:
            return []
        took = self.metrics.columns.get("time/step_s")
        began = column[0] - took[0] if took and math.isfinite(took[0]) else column[0]
        return [min(began, column[0]), column[-1]]

    def _commit(self) -> str:
        """Return the commit that the run was started with; empty if its folder does not say."""
        try:
            found = msgspec.json.decode((self.folder / "machine.json").read_bytes())
        except (OSError, *UNDECODABLE):
            return ""
        return str(found.get("commit", "")) if isinstance(found, dict) else ""


ALGORITHM = ("algorithm.advantage", "algorithm.loss", "algorithm.correction")


def _named(path: Any) -> str:
    """Return the names of a run's data sets."""
    parts = path if isinstance(path, list) else [path]
    return ", ".join(str(part.get("path", "") if isinstance(part, dict) else part) for part in parts if part)


class ViewedRuns:
    """The runs in ``places``, which are run folders or folders of runs. New runs appear by themselves."""

    def __init__(self, places: Sequence[Path]) -> None:
        """Raises UserError if a place is neither."""
        self._places = [place.absolute() for place in places]
        self._runs: dict[Path, ViewedRun] = {}
        for place in self._places:
            if not place.is_dir():
                raise UserError(f"{place} is no folder; give run folders such as runs/NAME, or a folder of runs")
            if len(places) == 1 and not list(_folders(place)):
                raise UserError(f"{place} is no run and holds none: there is no {CONFIG} in it or in its folders")

    def all(self) -> list[ViewedRun]:
        """Return the runs that exist now, the newest first."""
        folders = {folder: None for place in self._places for folder in _folders(place)}
        taken = {run.name for run in self._runs.values()}
        for folder in folders:
            if folder not in self._runs:
                name = next(name for name in _names(folder) if name not in taken)
                taken.add(name)
                self._runs[folder] = ViewedRun(name, folder)
        found = [self._runs[folder] for folder in folders]
        return sorted(found, key=_changed, reverse=True)

    def named(self, name: str) -> ViewedRun:
        """Return the run of that name. Raises RequestRefused (404) for an unknown one."""
        run = next((run for run in self.all() if run.name == name), None)
        if run is None:
            raise RequestRefused(f"there is no run {name[:200]!r}", code="no_run", status=404)
        return run


def _parsed(file: Path) -> tuple[dict[str, Any], str]:
    try:
        found = yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, f"{file}: {error}"
    return (dict(leaves(found)), "") if isinstance(found, dict) else ({}, f"{file} has no keys")


def _roster(folder: Path) -> Sequence[ProcessRecord]:
    """Return the processes of the run, or none: a partly copied folder may lack their list."""
    try:
        return read_roster(folder)
    except UserError:
        return ()


def _changed(run: ViewedRun) -> float:
    """Return the modification time of a run's config, or 0 if it is gone."""
    try:
        return (run.folder / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def _names(folder: Path) -> Iterator[str]:
    yield folder.name
    yield from (f"{folder.name}~{number}" for number in range(2, 1 << 30))


def _folders(place: Path) -> Iterator[Path]:
    if (place / CONFIG).is_file():
        yield place
        return
    for folder in sorted(place.iterdir()):
        if (folder / CONFIG).is_file():
            yield folder


CHAT = re.compile(r"/api/runs/[^/]+/chat")
# The longest words to a policy, in bytes.
SAID_BYTES = 1 << 20
# The path that the token is appended to.
OPEN = "/open/"
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class PageAccess(Access):
    """Admits a browser that has the token in its cookie, or opens OPEN with it."""

    def __init__(self, token: str, port: int) -> None:
        super().__init__(token)
        self.token = token
        # All ports of a host share their cookies, so the name has the port.
        self.cookie = f"rl-async-view-{port}"

    def refusal(self, method: str, path: str, address: str | None, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the reason for refusing a request; None if it may pass."""
        given, talks = list(headers), method == "POST" and CHAT.fullmatch(path) is not None
        if talks:
            # Pages of other servers on this machine get the cookie, too: only their origin tells them apart.
            own = [b"http://" + value for name, value in given if name == b"host"]
            if [value for name, value in given if name == b"origin"] != own or len(own) != 1:
                return 403, "only the page itself may talk to a run"
            if (b"content-type", b"application/json") not in given:
                return 403, "the body must be JSON"
            given = [(name, value) for name, value in given if name != b"origin"]
        offered = path.removeprefix(OPEN) if path.startswith(OPEN) else self._of_cookie(given)
        if offered:
            given.append((b"authorization", b"Bearer " + offered.encode()))
        refused = super().refusal(method, path, address, given)
        if refused is not None:
            return 403, refused[1] if refused[0] == 403 else "open the address that `rl-async view` printed"
        return None if talks or method in ("GET", "HEAD") else (403, "this page changes nothing")

    def _of_cookie(self, headers: Headers) -> str:
        for name, value in headers:
            if name == b"cookie":
                try:
                    found = SimpleCookie(value.decode("latin-1")).get(self.cookie)
                except CookieError:
                    return ""
                if found is not None:
                    return found.value
        return ""


class SecurityHeaders:
    """ASGI middleware that adds SECURITY_HEADERS to every response."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)


STATIC = Path(__file__).parent / "static"
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
# The interval for polling the files of the runs.
LOOK_S = 1.0
# After this long without an event, a stream sends a keep-alive comment.
QUIET_S = 15.0
# A diagnosis is cached for this time, and one with stacks for longer, since it interrupts the processes.
DIAGNOSIS_S = 1.5
STACKS_S = 15.0
# At most this many rows of a group are shown.
GROUP = 64


class Talks(Protocol):
    """Conversations with the policies of runs."""

    def say(self, run: Path, name: str, text: str) -> AsyncIterator[bytes]:
        """Yield the lines of an answer in the conversation ``name``; an empty name begins one."""
        ...

    async def close(self) -> None: ...


class Words(msgspec.Struct, forbid_unknown_fields=True):
    """What is said in a conversation; an empty one is new."""

    text: str
    conversation: str = ""


class ViewServer:
    """Handles the routes. Functions that read files run on threads. Without ``talks``, nobody can talk to a run."""

    def __init__(self, runs: ViewedRuns, access: PageAccess, talks: Talks | None = None) -> None:
        self._runs, self._access, self._talks = runs, access, talks
        self._indexer = Indexer()
        self._diagnoses: dict[str, tuple[float, bytes]] = {}
        self._diagnosing = asyncio.Lock()

    def application(self) -> Starlette:
        answers: dict[str, Callable[[ViewedRun, Request], Any]] = {
            "config": lambda run, _: run.config(),
            "metrics": self._metrics,
            "evaluations": self._evaluations,
            "compare": self._compare,
            "choices": self._choices,
            "trajectories": self._trajectories,
            "trajectories/{key}": self._trajectory,
            "trajectories/{key}/{sha256}": self._image,
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
                **({"POST /api/runs/{run}/chat": self._chat} if self._talks is not None else {}),
                **{f"GET /api/runs/{{run}}/{path}": self._on_thread(answer) for path, answer in answers.items()},
            }
        )

    def close(self) -> None:
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
            try:
                found = answer(run, request)
                return found if isinstance(found, Response) else _json(found)
            except UserError as error:
                raise RequestRefused(str(error), code="damaged", status=409) from error

        return handle

    async def _list(self, request: Request) -> Response:
        def summaries() -> list[dict[str, Any]]:
            # The page opens the first run, which should be one that trains.
            found = [_refreshed(run, run.summary) for run in self._runs.all()]
            return sorted(found, key=lambda run: run["evaluates"])

        return _json(await asyncio.to_thread(summaries))

    def _metrics(self, run: ViewedRun, request: Request) -> Any:
        given = request.query_params
        keys = [key for key in given.get("keys", "").split(",") if key]

        def columns() -> dict[str, Any]:
            epoch, after = integer("epoch", given.get("epoch", "-1")), integer("after", given.get("after", "0"))
            return {**run.metrics.since(keys, epoch, max(0, after)), "names": list(run.metrics.columns)}

        return _refreshed(run, columns)

    def _evaluations(self, run: ViewedRun, request: Request) -> Any:
        given = request.query_params.get("solved")
        solved = run.solved if given is None else number("solved", given)
        with self._indexer.of(run.folder).connect() as connection:
            table = index.table(connection, solved)
        return {"records": _refreshed(run, run.evaluations), "solved": solved, "table": table}

    def _compare(self, run: ViewedRun, request: Request) -> Any:
        before, after = (integer(side, request.query_params.get(side, "")) for side in ("before", "after"))
        other = self._runs.named(request.query_params.get("with") or run.name)
        first, second = (self._indexer.of(one.folder) for one in (run, other))
        with first.connect() as one, second.connect() as two:
            sides = index.recorded(one, run.name, before), index.recorded(two, other.name, after)
            return index.compared(*sides)

    def _choices(self, run: ViewedRun, request: Request) -> Any:
        own = self._indexer.of(run.folder)
        with own.connect() as connection:
            return {**index.choices(connection), "orders": list(index.ORDERS), **own.state()}

    def _trajectories(self, run: ViewedRun, request: Request) -> Any:
        with self._indexer.of(run.folder).connect() as connection:
            return index.find(connection, request.query_params)

    def _trajectory(self, run: ViewedRun, request: Request) -> Any:
        with self._indexer.of(run.folder).connect() as connection:
            found = index.row_of_key(connection, request.path_params["key"])
        row = row_at(run.folder / "trajectories" / found["file"], found["place"])
        step = found["step"] if found["partition"] == "train" else None
        tokenizer = tokenizer_of(run.folder, str(run.config().get("model.path", "")))
        return {**index.listed(found), **story(row, step, tokenizer.decode), "problem": tokenizer.problem}

    def _image(self, run: ViewedRun, request: Request) -> Response:
        with self._indexer.of(run.folder).connect() as connection:
            found = index.row_of_key(connection, request.path_params["key"])
        file, sha256 = run.folder / "trajectories" / found["file"], request.path_params["sha256"]
        if (data := read_images(file, [sha256]).get(sha256)) is None:
            raise RequestRefused(f"the image {sha256[:100]!r} was not recorded", code="no_image", status=404)
        return Response(data, media_type=mime_of(data))

    def _group(self, run: ViewedRun, request: Request) -> Any:
        partition, *numbers = request.path_params["key"].split("-")
        if len(numbers) != 2:
            raise RequestRefused("a group is PARTITION-STEP-GROUP", code="no_group", status=404)
        sample = request.query_params.get("sample")
        only = None if sample is None else integer("sample", sample)
        with self._indexer.of(run.folder).connect() as connection:
            rows = index.rows_of_group(connection, partition, *(integer("key", part) for part in numbers))
        rows = [row for row in rows if only in (None, row["sample"])][:GROUP]
        read = rows_in(run.folder / "trajectories", [(row["file"], row["place"]) for row in rows])
        return [
            {**index.listed(row), "turns": r.turns, "error_text": r.error} for row, r in zip(rows, read, strict=True)
        ]

    async def _diagnosis(self, request: Request) -> Response:
        run = await asyncio.to_thread(self._runs.named, request.path_params["run"])
        asked = "stacks" in request.query_params
        # Each diagnosis queries the queue and all engines of the run, so they take turns.
        async with self._diagnosing:
            until, body = self._diagnoses.get(run.name, (0.0, b""))
            if asked or time.monotonic() > until:
                body, lasts = await asyncio.to_thread(_diagnosed, run, asked)
                self._diagnoses[run.name] = time.monotonic() + lasts, body
        return Response(body, media_type="application/json")

    async def _chat(self, request: Request) -> Response:
        run = await asyncio.to_thread(self._runs.named, request.path_params["run"])
        try:
            words = msgspec.json.decode(await read_body(request, SAID_BYTES), type=Words)
        except UNDECODABLE as error:
            raise RequestRefused(f"the body is not {{text, conversation}}: {error}", code="no_words") from None
        assert self._talks is not None
        lines = self._talks.say(run.folder, words.conversation, words.text)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self._changes(), media_type="text/event-stream")

    async def _changes(self) -> AsyncIterator[bytes]:
        """Yield an event for each run that has changed. Waits LOOK_S between polls. Runs until the page is closed."""
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
        """Return the state of a run that the page follows."""
        summary = run.summary()
        progress = self._indexer.progress(run.folder)
        return {
            "run": run.name,
            "epoch": run.metrics.epoch,
            "count": len(run.metrics.steps),
            "evaluations": len(run.evaluations()),
            "indexed": None if progress is None else progress._asdict(),
            "running": summary["running"],
            "problem": summary["problem"],
        }


def _refreshed(run: ViewedRun, look: Callable[[], Any]) -> Any:
    """Read the new records of the run, then call ``look``, under the run's lock."""
    with run.lock:
        run.refresh()
        return look()


def _diagnosed(run: ViewedRun, asked: bool) -> tuple[bytes, float]:
    """Diagnose a run; return the JSON and the seconds to cache it. Stacks are read if ``asked`` for or helpful."""
    # Read first, so that no engine seems to lag behind an update that it received meanwhile.
    updates = newest_updates(run.timeline.read())
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


HOST = "127.0.0.1"


def serve(places: Sequence[Path], port: int, talks: Talks | None = None) -> None:
    """Serve the runs in ``places`` on the loopback interface; port 0 stands for a free one. ``talks`` is closed.

    Prints the address to open. Raises UserError for a place without runs, or if the port is taken.
    """
    watch_lifeline()
    runs = ViewedRuns(places)
    listener = bind(HOST, port, "--port")
    listener.listen()
    access = PageAccess(secrets.token_urlsafe(32), listener.getsockname()[1])
    print(f"http://{HOST}:{listener.getsockname()[1]}{OPEN}{access.token}", flush=True)
    print("only this machine can open it; Ctrl-C ends it", file=sys.stderr)

    async def run() -> None:
        server = ViewServer(runs, access, talks)
        http, ended_by = server_of(SecurityHeaders(server.application()), access), list[int]()

        def hang_up() -> None:
            ended_by.append(signal.SIGHUP)
            http.should_exit = True

        # Uvicorn itself handles SIGINT and SIGTERM. Raising in a handler here would look like an error of a request.
        for ending in heeded(signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(ending, hang_up)
        try:
            await http.serve(sockets=[listener])
        finally:
            server.close()
            if talks is not None:
                await talks.close()
        if ended_by:
            raise SystemExit(128 + signal.SIGHUP)

    for ending in heeded(signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _end)
    asyncio.run(run())


def _end(number: int, frame: FrameType | None) -> None:
    """Exit through ``finally`` blocks, which the signal's default action would skip."""
    raise SystemExit(128 + number)


# The most steps with a group, tasks with the answers of two versions, bytes of trajectories and numbers of metrics that
# a report contains.
STEPS = 50
COMPARED = 20
MOST_BYTES = 32 << 20
MOST_NUMBERS = 1 << 20


def write_report(folder: Path, out: Path) -> str:
    """Write the report of the run in ``folder``, and describe its content. Raises UserError if it is not a run."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is no run folder; name one, such as runs/NAME")
    (run,) = ViewedRuns([folder]).all()
    run.refresh()
    table = TrajectoryIndex(run.folder)
    try:
        table.update(threading.Event())
        with table.connect() as connection:
            data = _data(run, connection)
            choices = index.choices(connection)
            data["choices"] = {**choices, **table.state()}
            (count,) = connection.execute(f"SELECT count(*) FROM rows WHERE {index.CURRENT}").fetchone()
            data["recorded"] = {"trajectories": count, "steps": len(run.metrics.steps)}
    finally:
        table.close()
    report = {"runs": [run.summary()], "run": {run.name: data}}
    try:
        out.write_text(page(msgspec.json.encode(report).decode()), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    shown = f"{len(data['metrics']['steps'])} of {len(run.metrics.steps)} steps"
    return f"{out}: {shown}, {len(data['rows'])} of {count} trajectories"


def page(data: str) -> str:
    """Return the HTML of a report with this JSON."""
    style, script = ((STATIC / name).read_text(encoding="utf-8") for name in ("app.css", "app.js"))
    if "</script" in script.lower() or "</style" in style.lower():
        raise ValueError("the built page cannot stand inline")
    harmless = data.replace("<", "\\u003c")
    own = f"script-src {_hash(script)}; style-src {_hash(style)}"
    policy = f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="content-security-policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>rl-async report</title><style>{style}</style></head><body><div id="app"></div>'
        f'<script type="application/json" id="report">{harmless}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(run: ViewedRun, connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the responses that the page will request, under the names used in ``web/src/embedded.ts``."""
    table = index.table(connection, run.solved)
    data: dict[str, Any] = {
        "config": run.config(),
        "metrics": {**_thinned(run.metrics.since(run.metrics.columns, -1, 0)), "names": list(run.metrics.columns)},
        "evaluations": {"records": run.evaluations(), "solved": run.solved, "table": table},
        "rows": [],
        "trajectories": {},
    }
    steps = sorted({line["step"] for line in table})
    # The compared groups come first; several roles may share one.
    groups: dict[tuple[int, int], list[sqlite3.Row]] = {}
    if len(steps) > 1:
        data[f"compare {steps[0]} {steps[-1]}"] = compared = _compared(run, connection, steps[0], steps[-1])
        for place, step in enumerate((steps[0], steps[-1])):
            for group in dict.fromkeys(int(task["keys"][place].split("-")[2]) for task in compared["tasks"]):
                groups[step, group] = index.rows_of_group(connection, "eval", step, group)
    chosen = [*groups.values(), *_groups(connection)]
    tokenizer, size = tokenizer_of(run.folder, str(run.config().get("model.path", ""))), 0
    for rows in chosen:
        told = _told(run, rows, tokenizer)
        size += sum(len(msgspec.json.encode(one)) for one in told)
        if size > MOST_BYTES:
            break
        data["rows"] += map(index.listed, rows)
        data["trajectories"].update(zip(map(index.key_of, rows), told, strict=True))
    # The same order as ORDERS["newest"].
    data["rows"].sort(key=lambda row: (-row["step"], row["grp"], row["sample"], row["segment"]))
    return data


def _thinned(metrics: dict[str, Any]) -> dict[str, Any]:
    """Keep evenly spread steps, including the last, so that at most about MOST_NUMBERS numbers remain."""
    every = -(-len(metrics["steps"]) * len(metrics["columns"]) // MOST_NUMBERS) or 1
    kept = slice((len(metrics["steps"]) - 1) % every if metrics["steps"] else 0, None, every)
    columns = {name: column[kept] for name, column in metrics["columns"].items()}
    return {**metrics, "steps": metrics["steps"][kept], "columns": columns}


def _compared(run: ViewedRun, connection: sqlite3.Connection, before: int, after: int) -> dict[str, Any]:
    """Return the tasks that became worse most between two versions; none if the versions share no task."""
    sides = [index.recorded(connection, run.name, step) for step in (before, after)]
    try:
        found = index.compared(*sides)
    except RequestRefused:
        return {"sources": [], "tasks": [], "count": 0, "left_out": 0, "unscored": [0, 0]}
    return {**found, "tasks": found["tasks"][:COMPARED]}


def _told(run: ViewedRun, rows: Sequence[sqlite3.Row], tokenizer: TokenTexts) -> list[dict[str, Any]]:
    recorded = rows_in(run.folder / "trajectories", [(row["file"], row["place"]) for row in rows])
    return [
        {
            **index.listed(row),
            **story(one, row["step"] if row["partition"] == "train" else None, tokenizer.decode),
            "problem": tokenizer.problem,
        }
        for row, one in zip(rows, recorded, strict=True)
    ]


def _groups(connection: sqlite3.Connection) -> Iterator[list[sqlite3.Row]]:
    """Yield the rows of one group for each of STEPS evenly spread steps, the newest first.

    The group is the one whose rewards differ most or, among equals, the one with the most masked tokens.
    """
    found = connection.execute(
        f"SELECT step, grp FROM rows WHERE partition = 'train' AND {index.CURRENT} GROUP BY step, grp "
        f"ORDER BY step DESC, max({index.TOTAL}) - min({index.TOTAL}) DESC, sum(masked) DESC"
    )
    groups: dict[int, int] = {}
    for step, group in found:
        groups.setdefault(step, group)
    steps = list(groups)
    gaps = max(1, min(STEPS, len(steps)) - 1)
    for step in sorted(
        {steps[gap * (len(steps) - 1) // gaps] for gap in range(gaps + 1)} if steps else (), reverse=True
    ):
        yield index.rows_of_group(connection, "train", step, groups[step])
