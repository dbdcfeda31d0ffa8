"""``rl-async eval``: one pass over the held-out tasks.

``evaluate`` starts the processes of a run but its trainer. ``evaluate_endpoint`` (``--endpoint``) asks a model behind a
URL: an agent worker plays in this process, and no engine, trainer or transfer queue runs.

``Endpoint`` plays episodes on such a model, which takes messages instead of tokens.
``MessageLines`` is its chat format. Its tokens are the bytes of the conversation as JSON lines: the offered tools,
then a message each. So any endpoint can serve as an episode's engine, and calls keep the structure that the endpoint
gave them. ``Endpoint`` is that engine: it reads those lines, asks the endpoint, and returns a line.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from rl_async.agent_loop.chat_formats.format import (
    HERMES,
    THINK_END,
    THINK_START,
    Answer,
    Message,
    ParsedCall,
    SampledTurn,
    Settled,
    TooLong,
    Tools,
)
from rl_async.agent_loop.episode import policy_sampling
from rl_async.agent_loop.tools.tool_registry import task_tools
from rl_async.agent_loop.worker import AgentWorker, cancel_on_signals, runner_and_rewards
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import (
    EXIT_SIGNAL,
    ConfigError,
    DataError,
    EngineError,
    EngineLost,
    EngineRejected,
    RlAsyncError,
    RowsLost,
)
from rl_async.evaluation import answers_of, failed_row, failed_rows, summarize_with_total
from rl_async.files import UNDECODABLE
from rl_async.insight.recorded_evaluations import summary_table, write_lines
from rl_async.launcher.plan.artifacts import checkpoints_beside
from rl_async.launcher.plan.machine import check_api_keys, settle_here
from rl_async.launcher.plan.planning import serves_reward_model
from rl_async.launcher.run_folder import create, hold_unnamed, next_folder
from rl_async.launcher.runs.launch import announce, log_into, make_ready, note_machine, prepare
from rl_async.launcher.runs.prepare import prepare_data
from rl_async.launcher.supervisor import Interrupted, Supervisor, ThisMachine
from rl_async.messages import (
    CallProblem,
    Done,
    EngineRecord,
    Leased,
    LeasedGroup,
    Renewed,
    Reserved,
    SampleKey,
    Task,
    Trajectory,
    Version,
    VersionRun,
)
from rl_async.pictures import PictureProcessor
from rl_async.process.http_auth import run_token
from rl_async.process.private_folder import hold_private_folder
from rl_async.process.role import say
from rl_async.recording import evaluation_file, write_trajectories
from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.model_client import poster_of, read_api_key
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Image
from rl_async.rollout_server.pool import connect
from rl_async.transfer_queue.auth import client_keys
from rl_async.transfer_queue.client import QueueClient
from rl_async.transfer_queue.dataset import held_out_tasks
from rl_async.transfer_queue.images import images_of

# Ends a line; encoded JSON never contains it.
END = ord("\n")
# The average length of a token in most models.
TOKEN_CHARS = 4


class Function(msgspec.Struct, kw_only=True):
    """A function that a message calls. ``arguments`` is the JSON text that the model wrote."""

    name: str
    arguments: str = "{}"


class Call(msgspec.Struct, kw_only=True):
    """A tool call of a chat completion."""

    id: str = ""
    type: str = "function"
    function: Function


class AssistantLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the assistant, as a line has it."""

    role: str
    content: str = ""
    tool_calls: list[Call] = []
    reasoning: str = ""


def line(value: Any) -> list[int]:
    """Return a line as tokens."""
    return [*msgspec.json.encode(value), END]


def read_lines(token_ids: Sequence[int]) -> tuple[list[dict[str, Any]], list[Message]]:
    """Decode tokens to the tools and the messages."""
    tools, *messages = msgspec.json.Decoder().decode_lines(bytes(token_ids))
    return tools, messages


class MessageLines:
    """Encodes conversations as lines of JSON for an endpoint, which has a chat template of its own."""

    name = "messages"
    prints_tools = True
    plain_turns = False
    pictures: PictureProcessor | None = None

    def __init__(self) -> None:
        self.stop_token_ids = [END]

    def prompt(
        self, messages: Sequence[Message], tools: Tools = (), *, sampled: Collection[int] = (), limit: int = sys.maxsize
    ) -> list[int]:
        """Encode the conversation so far. Raises TooLong unless there are fewer than ``limit`` tokens."""
        return _within(limit, [*line(list(tools)), *self._lines(messages)])

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Encode the lines of ``messages``. Raises TooLong unless these are fewer than ``limit`` tokens."""
        return _within(limit, self._lines(messages))

    def expand(
        self, token_ids: list[int], messages: Sequence[Message], *, start: int = 0, limit: int = sys.maxsize
    ) -> tuple[list[int], list[Image]]:
        """Return the tokens as they are. Raises DataError for images, since a line of them would be all tokens."""
        if images_of(messages):
            raise DataError(f"{SECTION}: images are not sent to endpoints; evaluate their tasks with a model folder")
        return token_ids, []

    def _lines(self, messages: Sequence[Message]) -> list[int]:
        return [token for message in messages for token in line(message)]

    def parse(self, turn: SampledTurn) -> Answer:
        said = _last_said(turn.token_ids)
        return Answer(_with_calls(said), said.content, [_parsed(call) for call in said.tool_calls], said.reasoning)

    def settled(self, turn: SampledTurn) -> Settled:
        """Settle nothing before the end of the turn."""
        return Settled()

    def call_opening(self, name: str = "") -> list[int]:
        """Return nothing, since the endpoint decides how a call begins."""
        return []

    def keeps_past(
        self, messages: Sequence[Message], place: int, tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> bool:
        """Return True, since the endpoint decides about earlier reasoning."""
        return True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Write a turn as one text, with its reasoning and calls as Hermes' format has them."""
        said = _last_said(token_ids)
        thought = f"{THINK_START}\n{said.reasoning}\n{THINK_END}\n\n" if said.reasoning else ""
        return thought + _with_calls(said)

    def cut(self, text: str, tokens: int) -> str:
        """Cut a tool's text to about ``tokens`` tokens of a model, whose tokenizer is unknown here."""
        return text[: tokens * TOKEN_CHARS]

    def check(
        self, messages: Sequence[Message], token_ids: Sequence[int], tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> int | None:
        """Return None, since no template exists here."""
        return None


def _within(limit: int, token_ids: list[int]) -> list[int]:
    if len(token_ids) >= limit:
        raise TooLong(len(token_ids))
    return token_ids


def _last_said(token_ids: Sequence[int]) -> AssistantLine:
    """Read a turn; one without tokens says nothing."""
    return msgspec.json.decode(bytes(token_ids), type=AssistantLine) if token_ids else AssistantLine(role="assistant")


def _with_calls(said: AssistantLine) -> str:
    calls = (HERMES.render(call.function.name, call.function.arguments or "{}") for call in said.tool_calls)
    return "\n".join(filter(None, [said.content, *calls]))


def _parsed(call: Call) -> ParsedCall:
    function = call.function
    arguments, problem = read_arguments(function.arguments)
    raw = f'{{"name": {msgspec.json.encode(function.name).decode()}, "arguments": {function.arguments or "{}"}}}'
    return ParsedCall(function.name, arguments, raw, problem, call.id)


def read_arguments(text: str) -> tuple[dict[str, object] | None, CallProblem | None]:
    """Read the arguments of a call, or return None and the problem if they are not a JSON object. An empty text counts
    as an empty object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except UNDECODABLE:
        return None, "bad_json"
    return (value, None) if isinstance(value, dict) else (None, "bad_arguments")


SECTION = "eval.endpoint"
# An endpoint that never answered in these attempts, which pause for 7 s in all, probably has a wrong address.
ATTEMPTS_TO_REACH = 4
# Errors quote so many characters of an answer.
SHOWN = 300


class _Message(msgspec.Struct):
    """OpenRouter, and vLLM from 0.11 on, send ``reasoning``; DeepSeek, SGLang and older vLLM ``reasoning_content``."""

    content: str | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Endpoint:
    """A `Generator` of conversations in the format of `MessageLines`.

    Its "tokens" have no log-probabilities, and say nothing about how many the endpoint sampled. Raises ConfigError if
    the environment lacks the API key. ``tell`` is called with the first failure of a request that is retried.
    """

    def __init__(self, config: EndpointConfig, tell: Callable[[str], None] | None = None) -> None:
        self._config = config
        key = read_api_key(config.api_key_env, f"{SECTION}.api_key_env")
        self._poster = poster_of(config, config.url, SECTION, key, attempts_to_reach=ATTEMPTS_TO_REACH, tell=tell)

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Ask for the next message of the conversation in ``request``.

        Raises EngineLost if no attempt was answered, and EngineRejected unless the answer is a chat completion.
        """
        tools, messages = read_lines(request.token_ids)
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [_sent(message) for message in messages],
            "temperature": sampling.temperature,
            "max_tokens": request.max_tokens,
        }
        if tools:
            body["tools"] = tools
        body |= self._config.extra_body
        try:
            raw = await self._poster.post({key: value for key, value in body.items() if value is not None})
        except ScorerFailed as error:
            raise EngineLost(f"{SECTION}: {error}") from None
        choice = self._choice(raw)
        message = choice.message
        said = AssistantLine(
            role="assistant",
            content=message.content or message.refusal or "",
            tool_calls=message.tool_calls or [],
            reasoning=message.reasoning or message.reasoning_content or "",
        )
        token_ids = line(said)
        return GenerateResult(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            versions=[VersionRun(Version(), 0, len(token_ids))],
            finish_reason="length" if choice.finish_reason == "length" else "stop",
            engine=self._config.model,
        )

    def _choice(self, raw: bytes) -> _Choice:
        try:
            choices = msgspec.json.decode(raw, type=_Completion).choices
        except UNDECODABLE as error:
            shown = raw[:SHOWN].decode(errors="replace")
            raise EngineRejected(
                f"{SECTION}: {self._poster.url} answered with no chat completion ({error}): {shown}"
            ) from error
        if not choices:
            raise EngineRejected(f"{SECTION}: {self._poster.url} answered with a chat completion without a choice")
        return choices[0]

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        await self._poster.close()


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as endpoints take it.

    They get no reasoning back, no name of the tool beside the id of its call, and only arguments that are JSON: vLLM
    refuses a conversation if a call has others, so malformed ones are wrapped as text.
    """
    if message["role"] == "tool":
        return {key: value for key, value in message.items() if key != "name"}
    if message["role"] != "assistant" or not message.get("tool_calls"):
        return {key: value for key, value in message.items() if key != "reasoning"}
    said = msgspec.convert(message, AssistantLine)
    for call in said.tool_calls:
        if read_arguments(call.function.arguments)[0] is None:
            call.function.arguments = msgspec.json.encode({"malformed": call.function.arguments}).decode()
    return {"role": "assistant", "content": said.content or None, "tool_calls": msgspec.to_builtins(said.tool_calls)}


EVAL_ID = 0
POLL_S = 5.0
# The interval between lines that report progress.
PROGRESS_S = 30.0
# The deadline for fetching finished episodes when an evaluation ends early.
FETCH_S = 20.0


class EvaluationTimeout(RlAsyncError):
    """No further held-out task was finished within trainer.batch_timeout_s; the message gives the reason."""


def evaluate(config: RunConfig, name_or_path: str, solved: float, jsonl: Path | None) -> int:
    """Evaluate ``model.path`` on ``data.eval_path``, print the results by data source, and return the exit code.

    An episode passes with a reward of ``solved`` or more. The episodes are also written to ``jsonl``. If the evaluation
    ends early, by a signal or an error, the completed episodes are written and reported.
    """
    if config.data.eval_path is None:
        raise ConfigError("data.eval_path: an evaluation needs held-out tasks")
    if not (model := Path(config.model.path)).exists():
        hint = checkpoints_beside(model) or "; an evaluation makes none (`rl-async sft` does)"
        raise ConfigError(f"model.path: no folder {model}{hint}")
    folder = next_folder(Path(config.launcher.run_dir), f"eval-{Path(name_or_path).stem}")
    config = without_training(msgspec.structs.replace(config, name=folder.name))
    console = Console()

    async def run() -> int:
        try:
            keys, trains = client_keys(config, folder, "operator"), client_keys(config, folder, "trainer")
            with Supervisor(planned, executor, folder, keys) as supervisor:
                await prepare(config, folder, planned, supervisor, console)
                say(console, f"run folder: {folder}")
                announce(config, folder, executor, console)
                async with QueueClient(supervisor.address, role="trainer", name="evaluation", keys=trains) as queue:
                    evaluation = EvaluationRun(queue, config, folder, console)
                    try:
                        await supervisor.run(evaluation.run, evaluation.on_engine)
                    finally:
                        evaluation.outcome.tell(solved, jsonl)
        except Interrupted as interruption:
            print("interrupted; every process has ended", file=sys.stderr)
            return EXIT_SIGNAL + interruption.number
        say(console, f"run folder: {folder}")
        return evaluation.outcome.exit_code

    with hold_unnamed(config, folder) as (config, folder), hold_private_folder(folder):
        config, machine = settle_here(config, folder)
        planned, ports = make_ready(config, folder)
        note_machine(folder, machine)
        executor = ThisMachine(ports, folder, planned.hosts)
        with log_into(folder):
            return asyncio.run(run())


def without_training(config: RunConfig) -> RunConfig:
    """Reduce training, whose groups the queue also admits, to a single small group."""
    return msgspec.structs.replace(
        config,
        data=msgspec.structs.replace(config.data, train_batch_groups=1),
        rollout=msgspec.structs.replace(config.rollout, group_size=2, replay=""),
        queue=msgspec.structs.replace(config.queue, max_staleness=0),
        trainer=TrainerConfig(steps=1, minibatches=1, batch_timeout_s=config.trainer.batch_timeout_s),
        weight_sync=msgspec.structs.replace(config.weight_sync, every=1, adapters="auto"),
    )


class Outcome:
    """Collects, writes and reports the episodes of an evaluation with ``samples`` of them for each task.

    ``rows`` belong to the episodes of ``result``, which is complete if ``whole``. ``unread`` says why the episodes that
    were complete at an early end could not be fetched.
    """

    def __init__(self, samples: int, console: Console) -> None:
        self._samples, self._console = samples, console
        self.result = Reserved(step=EVAL_ID, headers=[])
        self.rows: Sequence[Trajectory] = []
        # The images that the rows show, by SHA-256.
        self.media: Mapping[str, bytes] = {}
        self.whole = False
        self.unread = ""
        self.kept: list[Path] = []
        # 1 if a file could not be written.
        self.exit_code = 0

    @property
    def done(self) -> int:
        """The number of complete episodes."""
        return len({(header.group_id, header.sample) for header in self.result.headers})

    @property
    def count(self) -> int:
        """The number of episodes in the whole evaluation."""
        return len(self.result.tasks) * self._samples

    def record(self, folder: Path) -> None:
        """Write the rows into the run folder."""
        self._keep(evaluation_file(folder, EVAL_ID, whole=self.whole), partial(write_trajectories, media=self.media))

    def tell(self, solved: float, jsonl: Path | None) -> None:
        """Print the results, write the rows to ``jsonl``, and report an early end."""
        if self.rows or self.whole:
            print_report(self.result, solved, self._console)
        if jsonl is not None:
            self._keep(jsonl, write_lines)
        if self.unread:
            say(self._console, f"ended early; the episodes that were complete could not be fetched: {self.unread}")
        elif not self.done and not self.whole:
            say(self._console, "ended before an episode was complete")
        elif not self.whole:
            places = f", and kept in {' and '.join(map(str, self.kept))}" if self.kept else ""
            say(self._console, f"ended after {self.done} of {self.count} episodes; only these are counted{places}")

    def _keep(self, path: Path, write: Callable[[Path, Sequence[Trajectory]], None]) -> None:
        """Write the rows to a file. A failure is printed and sets the exit code, but does not hide the results."""
        if not self.rows and not self.whole:
            return
        try:
            write(path, self.rows)
            self.kept.append(path)
        except OSError as error:
            self.exit_code = 1
            say(self._console, f"{path} could not be written: {error.strerror or error}")


class EvaluationRun:
    """One evaluation, which the supervisor runs in place of the trainer."""

    def __init__(self, queue: QueueClient, config: RunConfig, folder: Path, console: Console) -> None:
        self._queue, self._timeout_s, self._folder = queue, config.trainer.batch_timeout_s, folder
        self._token, self._console = run_token(folder, "engines"), console
        self.outcome = Outcome(config.eval.samples, console)

    async def on_engine(self, record: EngineRecord) -> None:
        """Send an update without buckets: the engine keeps the weights of ``model.path``, as version 0."""
        engine = connect(record.kind, record.url, token=self._token)
        try:
            await engine.pause("keep")
            await engine.start_update()
            await engine.finish_update(Version())
            await engine.resume()
        finally:
            await engine.close()
        await self._queue.publish(Version(), [record.engine_id])
        # If version 0 was already published by another engine, this one is only routable once it confirms it.
        await self._queue.confirm(record.engine_id, Version())

    async def run(self) -> None:
        """Request the evaluation, wait for its last trajectory, and write all of them into the run folder.

        If it is cancelled or fails, the finished episodes are kept. Raises EvaluationTimeout if no further task is
        finished within the deadline, not counting the time when no agent program plays.
        """
        await self._queue.evaluate(EVAL_ID)
        try:
            while not self.outcome.whole:
                try:
                    await self._fetch(await self._wait())
                    self.outcome.whole = True
                except RowsLost as error:
                    say(self._console, f"{error}; their episodes are played again")
        except (asyncio.CancelledError, RlAsyncError):
            await self._fetch_finished()
            raise
        finally:
            # A thread would go on beside the actions that follow a signal, so this blocks.
            self.outcome.record(self._folder)

    async def _wait(self) -> Reserved:
        deadline, finished, told = 0.0, -1, time.monotonic()
        while not isinstance(reply := await self._queue.eval_result(EVAL_ID, POLL_S), Reserved):
            now = time.monotonic()
            # The count of finished tasks falls if rows are lost and played again, which is progress too.
            if reply.unattended_s or reply.finished != finished:
                deadline, finished = now + self._timeout_s, reply.finished
            if now > deadline:
                limit = f"trainer.batch_timeout_s={self._timeout_s:g}"
                raise EvaluationTimeout(f"no further task was finished within {limit}: {reply.why}")
            if now - told >= PROGRESS_S:
                told = now
                say(self._console, f"{reply.finished} of {reply.groups} tasks")
        return reply

    async def _fetch(self, result: Reserved) -> None:
        rows = await self._queue.fetch([header.key for header in result.headers])
        self.outcome.media = await self._queue.fetch_media(rows)
        failed = failed_rows(result, rows)
        self.outcome.rows = [*rows, *failed]
        headers = [*result.headers, *(row.header() for row in failed)]
        self.outcome.result = msgspec.structs.replace(result, headers=headers)

    async def _fetch_finished(self) -> None:
        """Fetch the complete episodes; if the queue no longer answers, note that in the outcome."""
        self.outcome.unread = "interrupted"
        try:
            async with asyncio.timeout(FETCH_S):
                reply = await self._queue.eval_result(EVAL_ID, 0.0, so_far=True)
                if isinstance(reply, Reserved) and reply.headers:
                    await self._fetch(reply)
                    self.outcome.whole = self.outcome.done == self.outcome.count
            self.outcome.unread = ""
        except (RlAsyncError, TimeoutError) as error:
            self.outcome.unread = str(error) or f"no answer within {FETCH_S:g} s"


def print_report(result: Reserved, solved: float, console: Console) -> None:
    """Print avg@k and pass@k by data source and role and over all, and the number of episodes that were not scored."""
    tasks = {group: (task.data_source, task.task_id) for group, task in result.tasks.items()}
    answers = answers_of(result.headers, tasks)
    console.print(summary_table(summarize_with_total(answers, solved), "held-out reward"))
    if failed := sum(not answer.scored for answer in answers):
        say(console, f"{failed} of {len(answers)} episodes could not be scored, and count as 0; their error says why")


# A conversation's limit in bytes, which is never reached: the endpoint itself limits tokens.
UNBOUNDED = 1 << 30


def evaluate_endpoint(
    config: RunConfig, endpoint: EndpointConfig, name_or_path: str, solved: float, jsonl: Path | None
) -> int:
    """Evaluate a served model on ``data.eval_path``, as ``evaluate`` does for a folder; return the exit code.

    Episodes played before SIGINT, SIGTERM or an error are written and reported. Raises ConfigError, before any episode,
    if the endpoint does not answer a first request, and RlAsyncError, after writing all files, if no episode was
    scored.
    """
    _require_playable(config)
    folder = next_folder(Path(config.launcher.run_dir), f"eval-{Path(name_or_path).stem}")
    model = msgspec.structs.replace(config.model, path=endpoint.model)
    config = msgspec.structs.replace(config, name=folder.name, model=model)
    console = Console()
    prepare_data(config, lambda line: say(console, line))
    samples = HeldOutSamples(held_out_tasks(config), config)
    with hold_unnamed(config, folder) as (config, folder):
        try:
            code = asyncio.run(_play_and_tell(config, endpoint, samples, folder, console))
        finally:
            outcome = Outcome(config.eval.samples, console)
            outcome.rows, outcome.whole = samples.rows, samples.done == samples.count
            headers = [row.header() for row in outcome.rows]
            outcome.result = Reserved(step=EVAL_ID, headers=headers, tasks=samples.tasks)
            # The folder is made once the endpoint has answered; before that there is nothing to report.
            if outcome.rows or folder.is_dir():
                outcome.record(folder)
                outcome.tell(solved, jsonl)
                say(console, f"run folder: {folder}")
    if code == 0 and not any(row.scored for row in outcome.rows):
        raise RlAsyncError(f"no episode could be scored; the error of the last one: {outcome.rows[-1].error}")
    return code or outcome.exit_code


def _require_playable(config: RunConfig) -> None:
    """Raise ConfigError if the evaluation needs a part of a run that an endpoint cannot replace."""
    if config.data.eval_path is None:
        raise ConfigError("data.eval_path: an evaluation needs held-out tasks")
    if config.agent.gateway is not None:
        raise ConfigError("agent.gateway: agent programs ask an endpoint themselves; set agent.gateway=null")
    if serves_reward_model(config):
        raise ConfigError("reward.model.url: a run starts its reward model itself; give the URL of one that runs")
    check_api_keys(config)


async def play(
    config: RunConfig,
    endpoint: EndpointConfig,
    samples: "HeldOutSamples",
    folder: Path,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Play and score all samples; the run folder is made once the endpoint has answered.

    ``tell`` is called with the first failure of a request that is retried. Raises ConfigError if the endpoint does not
    answer a first request, or for a mistake in the config.
    """
    async with AsyncExitStack() as stack:
        subject = Endpoint(endpoint, tell)
        stack.push_async_callback(subject.close)
        await _try(subject, config, endpoint, samples.tasks[0])
        create(config, folder)
        stack.enter_context(log_into(folder))
        config = msgspec.structs.replace(
            config,
            agent=msgspec.structs.replace(config.agent, max_tokens=UNBOUNDED, past_reasoning="keep"),
            # The worker leases a group for each ``group_size`` free slots, and a retried group has only one sample.
            rollout=msgspec.structs.replace(config.rollout, max_model_len=UNBOUNDED, group_size=1),
        )
        playing = runner_and_rewards(config, MessageLines(), subject, folder, logs=folder / "logs", owner="evaluation")
        runner, rewards = await stack.enter_async_context(playing)
        await AgentWorker(samples, runner, rewards, config).run()


async def _try(subject: Endpoint, config: RunConfig, endpoint: EndpointConfig, task: Task) -> None:
    """Send a first request with the task's tools, so that a wrong key or name, or a server without tools, is reported
    once and not by every episode. Tools of MCP servers and environments are not known yet."""
    chat, tools = MessageLines(), [tool.schema for tool in task_tools(config, task)]
    request = GenerateRequest(
        request_id="first",
        token_ids=chat.prompt([{"role": "user", "content": "Say OK."}], tools),
        sampling=policy_sampling(config, "eval"),
        max_tokens=config.rollout.max_tokens,
        stop_token_ids=chat.stop_token_ids,
    )
    try:
        await subject.generate(request, session="first")
    except EngineError as error:
        raise ConfigError(f"a first request for {endpoint.model} was not answered: {error}") from None


async def _play_and_tell(
    config: RunConfig, endpoint: EndpointConfig, samples: "HeldOutSamples", folder: Path, console: Console
) -> int:
    """Play all samples, or until SIGINT or SIGTERM, and print the progress from time to time. Return the exit code."""
    received = cancel_on_signals()
    playing = asyncio.create_task(play(config, endpoint, samples, folder, partial(say, console)))
    try:
        while not (await asyncio.wait([playing], timeout=PROGRESS_S))[0]:
            say(console, f"{samples.done} of {samples.count} episodes")
        await playing
    except asyncio.CancelledError:
        if not received:
            raise
        playing.cancel()
        await asyncio.wait([playing])
        return EXIT_SIGNAL + received[0]
    return 0


class HeldOutSamples:
    """A `SampleQueue` of the held-out tasks that keeps the rows, in the order of tasks and samples.

    A sample that fails ``queue.max_attempts`` times gets an unscored row with the last error.
    """

    def __init__(self, tasks: Sequence[Task], config: RunConfig) -> None:
        self.tasks = dict(enumerate(tasks))
        self._sampling, self._max_attempts = policy_sampling(config, "eval"), config.queue.max_attempts
        samples = config.eval.samples
        self.count = len(tasks) * samples
        self._waiting = deque(self._group(group, 0, list(range(samples))) for group in self.tasks)
        self._rows: dict[tuple[int, int], Sequence[Trajectory]] = {}
        self._changed = asyncio.Event()

    @property
    def done(self) -> int:
        """The number of samples that were played or have failed for good."""
        return len(self._rows)

    @property
    def rows(self) -> list[Trajectory]:
        """The rows of all finished samples."""
        return [row for key in sorted(self._rows) for row in self._rows[key]]

    async def lease(self, max_groups: int, wait_s: float) -> Leased:
        """Return samples to play and, once all are done, that the evaluation is finished."""
        if not self._waiting and self.done < self.count:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        groups = [self._waiting.popleft() for _ in range(min(max_groups, len(self._waiting)))]
        return Leased(groups=groups, finished=self.done == self.count)

    async def renew(self, held: list[SampleKey]) -> Renewed:
        """Do nothing, since there is only one worker."""
        return Renewed()

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done:
        """Keep the rows of a sample."""
        for row in rows:
            _forget_tokens(row)
        self._finish(rows)
        return Done()

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done:
        """Queue the sample again, or keep its error after the last attempt."""
        if attempt + 1 < self._max_attempts:
            self._waiting.append(self._group(group_id, attempt + 1, [sample]))
            self._changed.set()
        else:
            self._finish([self._failed(self._group(group_id, attempt, [sample]), error)])
        return Done()

    def _finish(self, rows: Sequence[Trajectory]) -> None:
        self._rows[rows[0].group_id, rows[0].sample] = rows
        self._changed.set()

    def _group(self, group_id: int, attempt: int, samples: list[int]) -> LeasedGroup:
        return LeasedGroup(
            group_id=group_id,
            partition="eval",
            attempt=attempt,
            samples=samples,
            task=self.tasks[group_id],
            min_version=Version(),
        )

    def _failed(self, group: LeasedGroup, error: str) -> Trajectory:
        (sample,) = group.samples
        return failed_row(group.task, group.group_id, sample, error, attempt=group.attempt, sampling=self._sampling)


def _forget_tokens(row: Trajectory) -> None:
    """Reduce a row to its conversation: its tokens were only the bytes of the messages."""
    row.token_ids, row.loss_mask, row.logprobs = (np.array([], kind) for kind in (np.int32, np.bool_, np.float32))
    row.versions = []
    for turn in row.turns:
        turn.start = turn.end = 0
