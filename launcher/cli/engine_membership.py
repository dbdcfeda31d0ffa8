"""``rl-async engine list | add | remove``: lists and changes the engines of a running run.

An added engine is started and supervised by the user. Like a restarted one it first gets the published weights from the
trainer, and then requests. If it fails it is cut off and not restarted.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rl_async.configs.derived import is_loopback
from rl_async.configs.engines import EngineKind
from rl_async.configs.load import load_resolved
from rl_async.errors import EngineError, UserError
from rl_async.insight.diagnosis import ObservedEngine
from rl_async.launcher.cli.queue_actions import ANSWER_S, connected
from rl_async.launcher.plan.planning import HOST
from rl_async.messages import EngineList, EngineRecord
from rl_async.process.http_auth import TOKEN_FILE, UNAUTHORISED, read_token, token_file
from rl_async.process.run_files import ProcessRecord
from rl_async.rollout_server.http import EngineHttp
from rl_async.rollout_server.pool import connect

# A router over several engines is noticed unless it sends so many requests in a row to one of them.
ASKED = 8
LOOPBACK = (HOST, "localhost")
ADDED = "added-"


def table(engines: EngineList, seen: Sequence[ObservedEngine], processes: Sequence[ProcessRecord]) -> str:
    """Format the engines and their observed speeds as a table, one line each.

    Below it are the failed engines among the run's ``processes``, which are not restarted.
    """
    lines = [f"{'engine':24}{'kind':10}{'version':12}{'answers in':>12}{'tokens/s':>10}  url"]
    for engine, found in zip(engines.engines, seen, strict=True):
        version = "none yet" if engine.version is None else str(engine.version)
        answers = f"{found.answer_s:.2f} s" if found.answers else "never"
        speed = "" if found.tokens_per_s is None else f"{found.tokens_per_s:.0f}"
        lines.append(f"{engine.engine_id:24}{engine.kind:10}{version:12}{answers:>12}{speed:>10}  {engine.url}")
    failed = [process.name for process in processes if process.role == "engine" and process.state == "failed"]
    lines += [f"{name:24}failed and is not started again: logs/{name}.log" for name in failed]
    return "\n".join([*lines, f"published: version {engines.published}"])


def add_engine(run: Path, url: str, kind: EngineKind, wait_s: float) -> EngineRecord:
    """Register the engine at ``url`` and wait until it has confirmed the published weights.

    Raises UserError if the run is not running, if no engine of this kind answers there, if it refuses the run's token
    or accepts requests without, if it is a router over several engines, if the run has it already, or if it was cut off
    or has no weights after ``wait_s``.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise UserError(f"{url}: give the engine's address as http://HOST:PORT")
    if parts.hostname not in LOOPBACK and is_loopback(load_resolved(run / "config.yaml").queue.host):
        raise UserError(
            f"{url}: an address on this machine is needed, http://{HOST}:PORT: this run's weights travel on it only"
        )
    asyncio.run(_check_engine(url, kind, token_file(run, "engines")))
    # Names are not reused, since each stands for one process.
    engine_id = f"{ADDED}{parts.port}-{secrets.token_hex(2)}"
    with connected(str(run)) as queue:
        known = queue.engines()
        for engine in known.engines:
            if _place(engine.url) == _place(url):
                raise UserError(f"{url}: the run has it already, as {engine.engine_id}")
        queue.register_engine(engine_id, url.rstrip("/"), kind)
        deadline = time.monotonic() + wait_s
        while True:
            left = deadline - time.monotonic()
            known = queue.engines(after=known.revision, wait_s=max(0.0, min(left, ANSWER_S)))
            record = next((engine for engine in known.engines if engine.engine_id == engine_id), None)
            if record is not None and record.version is not None:
                return record
            if record is None or left <= 0:
                queue.remove_engine(engine_id, "it took no weights")
                what = "was cut off" if record is None else f"took no weights within {wait_s:g} s"
                raise UserError(f"{url}: the engine {what}; {run}/logs/trainer-0.log says why. It was removed again")


def _place(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return HOST if parts.hostname in LOOPBACK else parts.hostname, parts.port


def remove_engine(run: Path, engine_id: str) -> None:
    """Remove an engine. Its requests move to other engines, with the tokens sampled so far.

    Raises UserError if the run does not have this engine, or started it itself.
    """
    with connected(str(run)) as queue:
        known = [engine.engine_id for engine in queue.engines().engines]
        if engine_id not in known:
            raise UserError(f"no engine {engine_id}; there are: {', '.join(known) or 'none'}")
        if not engine_id.startswith(ADDED):
            raise UserError(f"{engine_id} belongs to the launcher, which would restart it; set rollout.engines instead")
        queue.remove_engine(engine_id, "removed by hand")


async def _check_engine(url: str, kind: EngineKind, file: Path) -> None:
    """Raise UserError unless an engine of this kind answers at ``url``, and only to the run's token."""
    token = read_token(file)
    client, stranger = connect(kind, url, timeout_s=ANSWER_S, token=token), EngineHttp(url, ANSWER_S)
    asking = EngineHttp(url, ANSWER_S, token=token)
    start = f"start it with {TOKEN_FILE}={file} in its environment, or, if it is an embedded one, with --run"
    try:
        if not await client.health():
            raise UserError(f"{url}: no {kind} engine answers GET /health there within {ANSWER_S:g} s")
        if not await stranger.needs_token():
            raise UserError(f"{url}: the engine takes requests without a token; {start}")
        await client.load()
        if (found := len({await asking.process() for _ in range(ASKED)})) > 1:
            raise UserError(
                f"{url}: requests there reach {found} engines in turn, so weights and pauses would miss all but one of "
                "them; add each engine by its own address"
            )
    except EngineError as error:
        if error.status == UNAUTHORISED[0]:
            raise UserError(f"{url}: the engine does not take this run's token; {start}") from error
        raise UserError(f"{url}: not usable as an engine of the kind {kind}, see --engine: {error}") from error
    finally:
        await client.close()
        await stranger.close()
        await asking.close()
