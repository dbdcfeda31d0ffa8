"""Plays the episodes of a gateway in environments of verifiers 0.4, in the Python that has it.

verifiers' own harness and rollout run; what they ask the model reaches the gateway, which records it, and the rewards
of the trace end the episode. Nothing of rl-async's dependencies is imported.

    the harness ──> verifiers' interception ──> Relay ──> the episode's URL at the gateway

    python -m rl_async.agent_loop.environments.player.verifiers < SETTINGS     # plays until standard input ends
    python -m rl_async.agent_loop.environments.player.verifiers write NAME FILE.jsonl    # the environment's tasks
"""

import argparse
import asyncio
import contextlib
import hmac
import itertools
import json
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from pydantic import ValidationError

from rl_async.concurrency import gather_or_cancel, outcomes, time_limit
from rl_async.errors import EXIT_RESTART, EXIT_USER, UserError
from rl_async.gateway import Gateway, GatewayError, RemoteEpisode

log = logging.getLogger("rl_async.player")

# verifiers withholds variables with API_KEY in their names from the programs that it starts.
KEY = "RL_ASYNC_RELAY_API_KEY"
# verifiers sends the trace's id in this header of every request.
SESSION = "X-Session-ID"
# Headers of one connection, and the encoding, which aiohttp undoes.
HOP = frozenset({"host", "content-length", "content-encoding", "transfer-encoding", "connection"})
KEYS = frozenset({"authorization", "x-api-key"})
# One question for an episode lasts so long, and a request to end takes effect behind it.
WAIT_S = 2.0
# Errors that may be the policy's doing, with the statuses of a refused request.
POLICYS = {"HarnessError": None, "ProviderError": (400, 413)}
# So many characters of an error are recorded.
LAST_WORDS = 2000


class Result(NamedTuple):
    """How an episode ended. ``problem`` says why it must be played again; ``error`` how the policy made it fail."""

    reward: float = 0.0
    parts: Mapping[str, float] = {}
    error: str = ""
    problem: str = ""


def result_of(episode: Any) -> Result:
    """Read verifiers' episode: the rewards of the one trace that is trained, by their names, and its metrics.

    A harness that failed after the policy had answered, or a request that the gateway refused, as one that is too
    long, may be the policy's doing: such an episode is worth 0. Played again until it ends well, it would train on its
    successes alone.
    """
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    failures = [*episode.errors, *(t.last_error for t in episode.traces if not t.ok and t not in trained)]
    if failures:
        return Result(problem=_told(failures[-1]))
    if len(trained) != 1:
        return Result(problem=f"it has {len(trained)} traces to train, and an episode has one reward")
    (trace,) = trained
    if trace.ok:
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Result(trace.reward, metrics | rewards)
    error = trace.last_error
    statuses = POLICYS.get(error.type, ())
    if trace.num_turns and (statuses is None or error.status_code in statuses):
        return Result(error=_told(error))
    return Result(problem=_told(error))


def _told(error: Any) -> str:
    return f"{error.type}: {error.message}"[-LAST_WORDS:] if error is not None else "verifiers names no error"


class Relay:
    """Passes what traces ask on to their episodes at the gateway.

    verifiers keeps a client for each URL until its end, so that all episodes need to have one URL.
    """

    def __init__(self, token: str) -> None:
        self._token, self._key = token, secrets.token_urlsafe(32)
        self._traces: dict[str, tuple[Any, RemoteEpisode]] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[vf.EvalClientConfig]:
        """Serve on a free port of loopback; yields what verifiers needs to know of it."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._pass_on)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), trust_env=False) as self._session:
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            os.environ[KEY] = self._key
            host, port = runner.addresses[0][:2]
            try:
                yield vf.EvalClientConfig(base_url=f"http://{host}:{port}/v1", api_key_var=KEY)
            finally:
                await runner.cleanup()

    def add(self, trace: Any, episode: RemoteEpisode) -> None:
        """Note which episode a trace belongs to."""
        self._traces[trace.id] = trace, episode

    def forget(self, traces: list[Any]) -> None:
        """Pass on nothing more of traces that are over."""
        for trace in traces:
            self._traces.pop(trace.id, None)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        key = headers.get("x-api-key") or headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            return web.json_response({"error": {"message": "the key is missing or wrong"}}, status=401)
        found = self._traces.get(headers.get(SESSION, ""))
        if found is None:
            return web.json_response({"error": {"message": "no episode is being played here"}}, status=404)
        trace, episode = found
        passed = {name: value for name, value in headers.items() if name.lower() not in HOP | KEYS}
        passed["Authorization"] = f"Bearer {self._token}"
        if not trace.agent.trainable:
            passed["X-RL-Async-Train"] = "no"
        url, body = episode.base_url + request.path_qs.removeprefix("/v1"), await request.read()
        try:
            async with self._session.request(request.method, url, headers=passed, data=body) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError as error:
            return web.json_response({"error": {"message": str(error)}}, status=503)


class Player:
    """Plays the episodes of a gateway, ``at_once`` of them."""

    def __init__(self, environments: Mapping[str, vf.Env], gateway: Gateway, at_once: int) -> None:
        self._environments, self._gateway, self._at_once = environments, gateway, at_once
        self._relay = Relay(gateway.token)
        self._playing = set[asyncio.Task[Any]]()
        self._stopping = False

    async def play(self, pool: ThreadPoolExecutor) -> None:
        """Play until the run is over. Waits for the gateway in threads of ``pool``, for verifiers here.

        Raises GatewayError or OSError if the gateway refuses or is not there.
        """
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            for environment in self._environments.values():
                await stack.enter_async_context(environment.serving())
            self._client = await stack.enter_async_context(self._relay.serving())
            asking = [loop.run_in_executor(pool, self._work, loop) for _ in range(self._at_once)]
            try:
                await gather_or_cancel(*asking)
            finally:
                self._stopping = True
                for playing in self._playing:
                    playing.cancel()
                await outcomes(*self._playing)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        for episode in self._gateway.episodes(lambda: self._stopping):
            result = asyncio.run_coroutine_threadsafe(self._play(episode), loop).result()
            if problem := result.problem or _end(episode, result):
                log.warning("task %s: given back: %s", episode.task["task_id"], problem)
                episode.fail(problem)

    async def _play(self, episode: RemoteEpisode) -> Result:
        this = asyncio.current_task()
        assert this is not None
        self._playing.add(this)
        traces, discarded = list[Any](), list[Any]()

        def begun(trace: Any) -> None:
            traces.append(trace)
            self._relay.add(trace, episode)

        context = vf.ModelContext(model="policy", client=self._client)
        try:
            environment, task = task_of(self._environments, episode.task["extra"])
            async with time_limit(episode.deadline_s) as deadline:
                ended = await environment.run_episode(task, context, on_trace=begun, on_discard=discarded.append)
        except UserError as error:
            return Result(problem=str(error))
        # An environment's code may raise anything.
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                return Result(problem=f"it did not end within {episode.deadline_s:g} s (agent.episode_timeout_s)")
            log.exception("task %s", episode.task["task_id"])
            return Result(problem=f"{type(error).__name__}: {error}"[:LAST_WORDS])
        finally:
            self._relay.forget(traces)
            self._playing.discard(this)
        # The gateway has recorded the answers of a discarded trace, which belong to no result.
        if discarded:
            return Result(problem=f"verifiers began it again: {_told(discarded[-1].last_error)}")
        return result_of(ended)


def _end(episode: RemoteEpisode, result: Result) -> str:
    """End an episode with its reward; return why the gateway refuses it, as one without an answer."""
    program = {"exit_code": 1, "output": result.error} if result.error else None
    reasons = {"reward": result.error} if result.error else None
    try:
        answer = episode.reward(result.reward, reasons, program, **result.parts)
    except GatewayError as error:
        return str(error)
    if not answer["accepted"]:
        log.warning("task %s: not accepted: %s", episode.task["task_id"], answer["reason"])
    return ""


def load(name: str, options: Mapping[str, Any]) -> vf.Env:
    """Load an environment by the name of its package, or that of its options' taskset.

    Raises UserError for one that does not exist or fit.
    """
    taskset = {"id": name} | (options.get("taskset") or {})
    try:
        return vf.load_environment(vf.resolve_env_config({**options, "taskset": taskset}))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"agent.environment_options: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"agent.environment: verifiers:{name}: {error}") from error


def task_of(environments: Mapping[str, vf.Env], extra: Mapping[str, Any]) -> tuple[vf.Env, vf.Task]:
    """Make the task that a row holds, and find its environment. Raises UserError for a row that holds none."""
    name = next(iter(environments)) if len(environments) == 1 else extra.get("environment")
    if not isinstance(name, str) or name not in environments:
        raise UserError(
            f"data: extra_info.environment is {name!r}, and agent.environment names {', '.join(environments)}"
        )
    environment = environments[name]
    kind = type(environment.taskset).task_type()
    try:
        data = kind.data_type().model_validate_json(extra.get("task") or "")
        return environment, kind(data, environment.config.taskset.task)
    except ValidationError as error:
        first = error.errors()[0]["msg"]
        raise UserError(
            f"data: extra_info.task holds no task of {name}, as `{__spec__.name} write` does: {first}"
        ) from error


def rows(name: str, environment: vf.Env, most: int | None) -> Iterator[dict[str, Any]]:
    """Yield an environment's tasks as rows. Raises UserError for endless ones without ``most``."""
    taskset = environment.taskset
    if most is None and not taskset.bounded:
        raise UserError(f"{name} has tasks without end; say how many by --tasks")
    for task in itertools.islice(taskset, most):
        data = task.data
        said = {"system": data.system_prompt, "user": data.prompt_text or data.description or data.name}
        prompt = [{"role": role, "content": text} for role, text in said.items() if text]
        yield {
            "data_source": name,
            "prompt": prompt or [{"role": "user", "content": f"task {data.idx}"}],
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": data.idx, "environment": name, "task": data.model_dump_json()},
        }


def _write(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name} write", description=rows.__doc__)
    parser.add_argument("name", metavar="NAME", help="one of agent.environment=verifiers:NAME,...")
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL file for data.path")
    parser.add_argument("--tasks", type=int, metavar="N", help="how many (default: all)")
    parser.add_argument("--options", type=json.loads, default={}, help="its agent.environment_options as JSON")
    given = parser.parse_args(arguments)
    written = [json.dumps(row) + "\n" for row in rows(given.name, load(given.name, given.options), given.tasks)]
    given.file.parent.mkdir(parents=True, exist_ok=True)
    given.file.write_text("".join(written))
    print(given.file, len(written))


async def _until_told(player: Player, pool: ThreadPoolExecutor) -> None:
    """Play until the run is over, or standard input ends."""
    playing = asyncio.create_task(player.play(pool))
    reader = asyncio.StreamReader()
    told = asyncio.create_task(reader.read())
    try:
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await asyncio.wait((playing, told), return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        playing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await playing


def main() -> int:
    """Do what the arguments, or the settings on standard input, say; return the exit code."""
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(format=form, stream=sys.stderr, level=logging.WARNING, force=True)
    try:
        if sys.argv[1:2] == ["write"]:
            _write(sys.argv[2:])
            return 0
        given = json.loads(sys.stdin.readline())
        environments = {name: load(name, options) for name, options in given["environments"].items()}
        # Without a URL, the settings are only tried.
        if "url" not in given:
            if "extra" in given:
                task_of(environments, given["extra"])
            return 0
        gateway = Gateway(given["url"], token_file=given["token_file"], wait_s=WAIT_S)
        with ThreadPoolExecutor(given["at_once"], thread_name_prefix="play") as pool:
            asyncio.run(_until_told(Player(environments, gateway, given["at_once"]), pool))
    except (GatewayError, OSError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return EXIT_RESTART
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    return 0


if __name__ == "__main__":
    sys.exit(main())
