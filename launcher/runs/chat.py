"""``rl-async chat``: talks to a model folder, or to a run's current weights, with the run's tools.

A running run's engines answer with the weights that they have by then. The newest checkpoint of an ended run, like a
model folder, is loaded into this process. A conversation is an episode with the user in place of a task: its tokens are
rendered, sampled and continued as those of training are, but nothing of it is scored or trained.
"""

import asyncio
import contextlib
import functools
import json
import math
import secrets
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from rich.console import Console
from rich.text import Text

from rl_async.agent_loop.chat_formats.format import ChatFormat, Message
from rl_async.agent_loop.episode import Episode
from rl_async.agent_loop.tools.mcp_toolbox import McpToolbox
from rl_async.agent_loop.tools.tool_registry import NO_SERVERS, TOOLS_OF_CODE, CodeTools, connect_servers, task_tools
from rl_async.concurrency import end_other_tasks
from rl_async.configs.load import load_config, load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ProtocolError, QueueLost, RlAsyncError, UserError
from rl_async.files import nearest_run
from rl_async.insight.doctor import launcher_of
from rl_async.insight.view.trajectories import REPLACEMENT, token_texts, tokenizer_of
from rl_async.launcher.plan.artifacts import check_model_folder, checkpoints
from rl_async.launcher.plan.machine import settle_here
from rl_async.launcher.sources import model_folder
from rl_async.messages import LeasedGroup, Task, Version
from rl_async.model_files import read_object
from rl_async.process.http_auth import run_token
from rl_async.process.role import printable, say
from rl_async.process.run_files import read_endpoints
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard, StreamingGenerator
from rl_async.rollout_server.pool import engine_pool
from rl_async.sandbox.kinds import make_sandbox
from rl_async.transfer_queue.auth import client_keys
from rl_async.transfer_queue.client import QueueClient

CONFIG = "config.yaml"
ANSWER_S = 10.0
# The likeliest tokens that are shown in the place of each sampled one.
ALTERNATIVES = 5
# A sampled token less likely than this is shown with its alternatives in the terminal.
DOUBTFUL = 0.9
# The length of a conversation with a model folder, unless the model or the config says less.
LONGEST = 8192
T = TypeVar("T")


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an answer, in order of arrival.

    ``text`` is what was sampled since the last part. At the end of a turn, ``tokens`` are all of its tokens with their
    log-probabilities, ``alternatives`` the likeliest tokens in the place of each, where the engine tells them,
    ``version`` are the weights that sampled the last of them, and ``finish`` says why it ended.
    ``call`` is a tool's name, with its arguments and result.
    """

    text: str = ""
    tokens: list[tuple[str, float]] = []
    alternatives: list[list[tuple[str, float]]] = []
    version: str = ""
    finish: str = ""
    call: str = ""
    arguments: str = ""
    result: str = ""


Tell = Callable[[Said], None]


class _Reporting:
    """A Generator that keeps its newest answer, and reports the tokens of each while they are sampled."""

    def __init__(self, source: StreamingGenerator) -> None:
        self._source = source
        self.heard: Heard | None = None
        self.newest: GenerateResult | None = None

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Sample a continuation, as the source does."""
        asked = msgspec.structs.replace(request, alternatives=max(ALTERNATIVES, request.alternatives))
        self.newest = await self._source.generate(asked, session=session, heard=self.heard)
        return self.newest


class Subject:
    """A policy to talk to. ``about`` says which weights answer; ``live`` ones change while a run trains them."""

    def __init__(
        self,
        config: RunConfig,
        chat: ChatFormat,
        source: StreamingGenerator,
        toolbox: McpToolbox | None,
        *,
        about: str,
        live: bool,
    ) -> None:
        self.config, self.chat, self.source, self.toolbox = config, chat, source, toolbox
        self.about, self.live = about, live
        self.decode = tokenizer_of(Path(config.model.path), config.model.path).decode or chat.turn_text


class Conversation:
    """A conversation with a subject: an episode with the user in place of a task. Close it."""

    def __init__(self, subject: Subject, system: str = "", *, greedy: bool = False) -> None:
        self._partition = "eval" if greedy else "train"
        self._subject, self._generator = subject, _Reporting(subject.source)
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._stack = contextlib.AsyncExitStack()
        self._episode: Episode | None = None

    async def close(self) -> None:
        """End the programs of its tools."""
        await self._stack.aclose()

    async def say(self, text: str, tell: Tell) -> None:
        """Answer the user's words, with calls of tools; ``tell`` gets the parts as they arrive.

        Raises UserError if the conversation is full, and EngineError.
        """
        words: Message = {"role": "user", "content": text}
        if self._episode is None:
            self._episode = await self._begin([*self._opening, words])
        elif not self._episode.add([words]):
            raise UserError("the conversation has no room for this, or its last answer was cut off; begin a new one")
        episode = self._episode
        for turns_left in reversed(range(self._subject.config.agent.max_turns)):
            finish = await self._turn(episode, tell)
            calls = episode.tool_calls() if finish == "stop" else []
            if not calls or not turns_left:
                break
            results = await episode.call(calls)
            for call in episode.turns[-1].tool_calls:
                tell(Said(call=call.name or "a call that cannot be read", arguments=call.arguments, result=call.result))
            if not episode.add(results):
                raise UserError("the conversation has no room for the results of its tools; begin a new one")

    async def _begin(self, prompt: list[Message]) -> Episode:
        config, toolbox = self._subject.config, self._subject.toolbox
        task = Task(task_id="chat", data_source="", prompt=prompt, ground_truth="")
        of_servers = self._stack.enter_context(toolbox.episode()) if toolbox else NO_SERVERS
        tools = task_tools(config, task, of_servers)
        if any(tool in TOOLS_OF_CODE for tool in tools):
            code = CodeTools(make_sandbox(config.sandbox), config)
            tools = (await self._stack.enter_async_context(code)).bind(tools)
        # Engines know requests by names that begin with it; those of the run's own groups are smaller.
        number = (1 << 48) + secrets.randbits(48)
        group = LeasedGroup(
            group_id=number, partition=self._partition, attempt=0, samples=[0], task=task, min_version=Version()
        )
        return Episode(group, 0, config=config, chat=self._subject.chat, generator=self._generator, tools=tools)

    async def _turn(self, episode: Episode, tell: Tell) -> str:
        """Sample one turn, and return why it ended."""
        chat, said = self._subject.chat, ""

        def heard(tokens: Sequence[int]) -> None:
            nonlocal said
            now = chat.turn_text(tokens).rstrip(REPLACEMENT)
            if now.startswith(said) and now != said:
                tell(Said(text=now[len(said) :]))
                said = now

        self._generator.heard, self._generator.newest = heard, None
        finish = await episode.generate()
        result = self._generator.newest
        if result is None or not result.token_ids:
            tell(Said(finish=finish))
            return finish
        heard(result.token_ids)
        version = f"{result.versions[-1].version}" if self._subject.live else ""
        decode = self._subject.decode
        tokens = list(zip(token_texts(result.token_ids, decode), result.logprobs, strict=True))
        alternatives = [[(decode([token]), logprob) for token, logprob in place] for place in result.alternatives]
        tell(Said(tokens=tokens, alternatives=alternatives, version=version, finish=finish))
        return finish


@contextlib.asynccontextmanager
async def open_subject(place: str, preset: str | None, overrides: Sequence[str] = ()) -> AsyncIterator[Subject]:
    """Hold the policy in the run folder or model ``place``. ``preset`` names a config with the tools of a model.

    Raises UserError if neither is there, and an ExceptionGroup with QueueLost when the run ends meanwhile.
    """
    run = Path(place)
    async with contextlib.AsyncExitStack() as stack:
        if not (run / CONFIG).is_file():
            folder = model_folder(place, "RUN|MODEL")
            check_model_folder(folder, "RUN|MODEL")
            config, _ = settle_here(load_config(preset, [*_of_model(folder, preset), *overrides]), None)
            config = _roomy(config, None)
            about, live = f"the model {place}", False
        elif preset is not None:
            raise UserError("--config: a run has its own config; leave it out")
        elif launcher_of(run) is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-async-chat-"))) / "model"
            step = await asyncio.to_thread(_export, run, folder)
            config = _roomy(load_resolved(run / CONFIG, overrides), folder)
            about, live = f"checkpoint {step} of {place}, which has ended", False
        else:
            config = _roomy(load_resolved(run / CONFIG, overrides), None)
            about, live = f"the current weights of {place}", True
        # Importing transformers takes seconds.
        from rl_async.agent_loop.chat_formats.format_registry import load_format

        chat = await asyncio.to_thread(load_format, config.model.path, config.agent)
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-async-mcp-"))
        toolbox = await stack.enter_async_context(connect_servers(config.agent, Path(logs), "chat"))
        if live:
            source: StreamingGenerator = await _engines_of(run, config, stack)
        else:
            source = await asyncio.to_thread(_loaded, config, stack)
        yield Subject(config, chat, source, toolbox, about=about, live=live)


def _of_model(folder: Path, preset: str | None) -> list[str]:
    """Return the config keys of a model folder: without a preset, an answer may take half of a conversation's room."""
    path = [f"model.path={json.dumps(str(folder), ensure_ascii=False)}"]
    if preset is not None:
        return path
    most = read_object(folder / "config.json").get("max_position_embeddings")
    room = min(most, LONGEST) if isinstance(most, int) else LONGEST
    limits = [f"rollout.max_model_len={room}", f"agent.max_tokens={room}", f"rollout.max_tokens={room // 2}"]
    return [*path, "data.path=none", *limits]


def _export(run: Path, folder: Path) -> int:
    if not checkpoints(run):
        raise UserError(f"{run} does not run, and has no checkpoint")
    # Importing torch takes seconds.
    from rl_async.trainer.export import export

    return export(run, folder)


def _roomy(config: RunConfig, folder: Path | None) -> RunConfig:
    """Give a conversation all the room that an engine has. A model in ``folder`` replaces the run's."""
    replace, agent, model = msgspec.structs.replace, config.agent, config.model
    if folder is not None:
        model = replace(model, path=str(folder))
    # What the environment says is left out, and so are its tools.
    agent = replace(agent, max_tokens=config.rollout.max_model_len, environment="", gateway=None, opponents={})
    # A greedy conversation samples as held-out tasks are.
    return replace(config, agent=agent, model=model, eval=replace(config.eval, temperature=0.0))


async def _engines_of(run: Path, config: RunConfig, stack: contextlib.AsyncExitStack) -> StreamingGenerator:
    """Return the engines of a running run. Raises UserError if it has none yet."""
    keys = client_keys(config, run, "operator")
    client = QueueClient(read_endpoints(run).queue, role="launcher", name="chat", timeout_s=ANSWER_S, keys=keys)
    queue = await stack.enter_async_context(client)
    if not (await queue.engines()).engines:
        raise UserError(f"{run} has no engine yet that could answer; try again once it samples")
    pool = engine_pool(config.rollout, run_token(run, "engines"))
    stack.push_async_callback(pool.close)
    group = await stack.enter_async_context(asyncio.TaskGroup())
    stack.callback(group.create_task(pool.watch(queue), name="engine registry").cancel)
    return pool


def _loaded(config: RunConfig, stack: contextlib.AsyncExitStack) -> StreamingGenerator:
    """Load the model into this process."""
    from transformers.utils.logging import disable_progress_bar

    from rl_async.pictures import PictureProcessor
    from rl_async.rollout_server.embedded.engine_thread import LocalEngine
    from rl_async.rollout_server.embedded.server import load_model

    disable_progress_bar()
    engine = LocalEngine(
        load_model(config),
        max_batch=1,
        max_length=config.rollout.max_model_len,
        pictures=PictureProcessor.load(config.model.path),
    )
    # Its thread delivers to the event loop, so it has to end before the loop.
    stack.callback(engine.close)
    return engine


class HeldSubject:
    """A subject held open by a task of its own, since its connections must be closed where they were opened."""

    def __init__(self, opening: contextlib.AbstractAsyncContextManager[Subject]) -> None:
        self._over, self._opened = asyncio.Event(), asyncio.Event()
        self._subject: Subject | None = None
        self._task = asyncio.create_task(self._hold(opening), name="chat subject")

    async def _hold(self, opening: contextlib.AbstractAsyncContextManager[Subject]) -> None:
        async with opening as self._subject:
            self._opened.set()
            await self._over.wait()

    async def subject(self) -> Subject:
        """Return the subject once it is open. Raises what prevents that."""
        await self.during(self._opened.wait())
        assert self._subject is not None
        return self._subject

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` while the subject is open. Raises what ends it, and UserError if its run ends meanwhile."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if task.cancelled():
            # Raises the error with which opening failed.
            with _ended_run():
                self._task.result()
            raise UserError("the conversation is over; begin a new one")
        return task.result()

    @property
    def over(self) -> bool:
        """Whether it has ended, perhaps because its run did."""
        return self._task.done()

    async def close(self) -> None:
        """Let go of the subject, and wait until its connections and programs are closed."""
        self._over.set()
        with _ended_run():
            await self._task


@contextlib.contextmanager
def _ended_run() -> Iterator[None]:
    """Turn the loss of the queue into a UserError."""
    try:
        yield
    except* (QueueLost, ProtocolError) as lost:
        ended = lost
    else:
        return
    raise UserError("the run has ended; give the command again to talk to its newest checkpoint") from ended


Opening = Callable[[str, str | None], contextlib.AbstractAsyncContextManager[Subject]]
# The page keeps so many conversations.
CONVERSATIONS = 16


class Chats:
    """The conversations of the page (``insight.view.page.Talks``), with one run at a time and one answer at a time."""

    def __init__(self, opening: Opening = open_subject) -> None:
        self._opening = opening
        self._run: Path | None = None
        self._held: HeldSubject | None = None
        self._conversations: dict[str, Conversation] = {}
        self._answering = asyncio.Lock()

    async def say(self, run: Path, name: str, text: str) -> AsyncIterator[bytes]:
        """Yield lines of JSON: about the conversation, parts of the answer (``Said``), or an error.

        An empty ``name`` begins a conversation. The answer ends with its reader.
        """
        lines = asyncio.Queue[bytes]()
        task = asyncio.create_task(
            self._answer(run, name, text, lambda part: lines.put_nowait(msgspec.json.encode(part) + b"\n"))
        )
        task.add_done_callback(lambda _: lines.put_nowait(b""))
        try:
            while line := await lines.get():
                yield line
            await task
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _answer(self, run: Path, name: str, text: str, tell: Callable[[Any], None]) -> None:
        try:
            async with self._answering:
                held = await self._of(run)
                subject = await held.subject()
                if not name:
                    name = secrets.token_hex(8)
                    self._conversations[name] = Conversation(subject)
                    for oldest in list(self._conversations)[:-CONVERSATIONS]:
                        await self._conversations.pop(oldest).close()
                if name not in self._conversations:
                    raise UserError("this conversation is over; begin a new one")
                tools = list(subject.config.agent.tools)
                tell({"conversation": name, "about": subject.about, "tools": tools})
                await held.during(self._conversations[name].say(text, tell))
        except RlAsyncError as error:
            tell({"error": str(error)})

    async def _of(self, run: Path) -> HeldSubject:
        """Return the subject of a run, after closing that of another run or of the same run before it ended."""
        if self._held is None or self._held.over or self._run != run:
            await self.close()
            self._run, self._held = run, HeldSubject(self._opening(str(run), None))
        return self._held

    async def close(self) -> None:
        """End all conversations, and let go of their run or model."""
        for conversation in self._conversations.values():
            await conversation.close()
        self._conversations.clear()
        if self._held is not None:
            # A subject that ended by itself has been told of.
            with contextlib.suppress(RlAsyncError):
                await self._held.close()
        self._held = None


HELP = (
    "/new begins a new conversation, /p shows the tokens of each answer with their probabilities, and the likeliest "
    "ones where they were in doubt, Ctrl-D ends"
)


def chat(
    place: str, preset: str | None, overrides: Sequence[str], system: str, *, greedy: bool, probabilities: bool
) -> int:
    """Talk in the terminal, or answer the lines of standard input, until it ends.

    Raises UserError as ``open_subject`` does, and for what a line that is not typed cannot be answered with.
    """
    if not Path(place).exists() and (close := nearest_run(Path(place))):
        raise UserError(f"no run folder {place}; {close}")
    console, typed = Console(highlight=False), sys.stdin.isatty()
    with _loop_of_a_thread() as run:
        held = run(_held(open_subject(place, preset, overrides)))
        try:
            subject = run(held.subject())
            if typed:
                # Importing it makes ``input`` edit lines and remember them.
                import readline  # noqa: F401

                tools = ", ".join(subject.config.agent.tools) or "none"
                say(console, f"talking to {subject.about}; tools: {tools}\n{HELP}")
            conversation = Conversation(subject, system, greedy=greedy)
            while (line := _line(typed)) is not None:
                if line == "/new":
                    run(conversation.close())
                    conversation = Conversation(subject, system, greedy=greedy)
                elif line == "/p":
                    probabilities = not probabilities
                elif line == "/help":
                    say(console, HELP)
                elif line:
                    try:
                        run(held.during(conversation.say(line, functools.partial(_tell, console, probabilities))))
                    except KeyboardInterrupt:
                        console.print("\nstopped; this answer is left out of the conversation")
                    except RlAsyncError as error:
                        if not typed:
                            raise
                        console.print()
                        say(console, f"error: {error}")
            run(conversation.close())
        finally:
            run(held.close())
    return 0


async def _held(opening: contextlib.AbstractAsyncContextManager[Subject]) -> HeldSubject:
    return HeldSubject(opening)


def _line(typed: bool) -> str | None:
    """Read the next line; None at the end of the input."""
    try:
        return input("> " if typed else "").strip()
    except EOFError:
        return None


class RunsCoroutines(Protocol):
    """Runs a coroutine elsewhere, and waits for its result."""

    def __call__(self, work: Coroutine[Any, Any, T]) -> T: ...


@contextlib.contextmanager
def _loop_of_a_thread() -> Iterator[RunsCoroutines]:
    """Run coroutines on an event loop in a thread, so that connections live on while ``input`` waits.

    An interrupt cancels the coroutine that is awaited.
    """
    loop = asyncio.new_event_loop()
    # Consumes coroutines; produces their results. Waits for one; unblocked by ``stop``.
    thread = threading.Thread(target=loop.run_forever, name="chat", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    try:
        yield run
    finally:
        try:
            run(end_other_tasks())
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def shown(token: str) -> str:
    """Return a token's text in quotes, in which spaces and line breaks are seen."""
    return json.dumps(printable(token), ensure_ascii=False)


def _tell(console: Console, probabilities: bool, said: Said) -> None:
    """Print the next part of an answer."""
    print_ = console.print
    if said.text:
        print_(Text(printable(said.text)), end="", soft_wrap=True)
    if said.call:
        say(console, f"  {said.call}({said.arguments}) -> {said.result}")
    if said.finish:
        print_()
        if probabilities:
            for text, logprob in said.tokens:
                print_(Text(printable(text)), Text(f"[{math.exp(logprob):.2f}]", "dim"), sep="", end="", soft_wrap=True)
            print_()
            for (text, logprob), place in zip(said.tokens, said.alternatives):
                if math.exp(logprob) < DOUBTFUL:
                    others = "  ".join(f"{shown(other)} {math.exp(its):.2f}" for other, its in place)
                    say(console, f"  {shown(text)} {math.exp(logprob):.2f}  of  {others}")
        cut = "" if said.finish == "stop" else f"ended by {said.finish}"
        note = ", ".join(filter(None, [cut, f"weights {said.version}" if said.version else ""]))
        if note:
            print_(Text(f"  ({note})", "dim"))
