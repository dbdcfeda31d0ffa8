"""Coroutines at once: their results, and what becomes of the others when one fails or the caller is cancelled."""

import ast
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rl_async import concurrency
from rl_async.concurrency import DaemonCalls, Overdue, contained, gather_or_cancel, to_the_end, within


class Work:
    """Coroutines that note how they end."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}
        self.waiting = asyncio.Event()

    async def returns(self, name: str) -> str:
        await asyncio.sleep(0)
        self.ended[name] = "returned"
        return name

    async def raises(self, name: str) -> str:
        await asyncio.sleep(0)
        self.ended[name] = "raised"
        raise KeyError(name)

    async def waits(self, name: str) -> str:
        try:
            self.waiting.set()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            self.ended[name] = "cancelled"
            raise
        return name


@pytest.mark.parametrize("at_once", [gather_or_cancel, to_the_end])
async def test_results_come_in_the_order_of_the_work(at_once: Callable[..., Awaitable[list[str]]]) -> None:
    work = Work()
    assert await at_once() == []
    assert await at_once(work.returns("a"), work.returns("b")) == ["a", "b"]


async def test_the_others_have_ended_when_the_error_of_one_is_raised() -> None:
    work = Work()
    with pytest.raises(KeyError, match="b"):
        await gather_or_cancel(work.waits("a"), work.raises("b"), work.waits("c"))
    assert work.ended == {"a": "cancelled", "b": "raised", "c": "cancelled"}


async def test_all_is_done_before_an_error_is_raised() -> None:
    work = Work()
    with pytest.raises(KeyError, match="a"):
        await to_the_end(work.raises("a"), work.returns("b"), work.raises("c"))
    assert work.ended == {"a": "raised", "b": "returned", "c": "raised"}


@pytest.mark.parametrize("at_once", [gather_or_cancel, to_the_end])
async def test_what_is_cancelled_leaves_nothing_behind(at_once: Callable[..., Awaitable[list[str]]]) -> None:
    work = Work()
    task = asyncio.ensure_future(at_once(work.waits("a"), work.waits("b")))
    await work.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended == {"a": "cancelled", "b": "cancelled"}


async def test_work_that_cancels_itself_cancels_the_caller() -> None:
    async def cancels() -> str:
        raise asyncio.CancelledError

    work = Work()
    with pytest.raises(asyncio.CancelledError):
        await gather_or_cancel(work.waits("a"), cancels())
    assert work.ended == {"a": "cancelled"}


def package_sources() -> list[Path]:
    package = Path(concurrency.__file__).parent
    sources = [file for file in package.glob("**/*.py") if file.name != "concurrency.py"]
    sources += [file for part in package.iterdir() if part.is_symlink() for file in part.resolve().rglob("*.py")]
    assert len(sources) > 150
    return sources


def test_the_package_runs_nothing_at_once_that_may_outlive_its_caller() -> None:
    assert [str(file) for file in package_sources() if "asyncio.gather(" in file.read_text()] == []


def _unowned(tree: ast.AST) -> list[int]:
    """The lines of tasks in local variables that may outlive their function: it stores them nowhere, and neither a
    ``finally`` nor an ``except`` names them. A task without any name is ruff's RUF006."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        kept: set[str] = set()
        for node in ast.walk(function):
            inside: list[ast.AST] = []
            if isinstance(node, ast.Try):
                inside = [*node.finalbody, *node.handlers]
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name | ast.Tuple):
                inside = [node.value]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add", "append", "shield"):
                inside = list(node.args)
            elif isinstance(node, ast.Assign) and (
                isinstance(node.value, ast.List) or not all(isinstance(target, ast.Name) for target in node.targets)
            ):
                inside = [node.value]
            kept |= {name.id for part in inside for name in ast.walk(part) if isinstance(name, ast.Name)}
        for node in ast.walk(function):
            # Those of a TaskGroup end with it.
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(MAKES_TASKS):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if len(names) == len(node.targets) and not names & kept:
                    found.append(node.lineno)
    return found


MAKES_TASKS = ("asyncio.create_task(", "asyncio.ensure_future(")


def test_no_task_in_the_package_outlives_its_function_without_an_owner() -> None:
    texts = {file: file.read_text() for file in package_sources()}
    makers = {file: text for file, text in texts.items() if any(call in text for call in MAKES_TASKS)}
    found = [f"{file}:{line}" for file, text in makers.items() for line in _unowned(ast.parse(text))]
    assert found == []
    begin = "async def f():\n    task = asyncio.create_task(g())\n"
    lost, held = f"{begin}    await h()\n    await task\n", f"{begin}    try: await h()\n    finally: task.cancel()\n"
    assert (_unowned(ast.parse(lost)), _unowned(ast.parse(held))) == ([2], [])


async def test_work_that_takes_too_long_has_ended_when_that_is_raised() -> None:
    work = Work()
    with pytest.raises(Overdue):
        await within(0.05, work.waits("a"))
    assert work.ended == {"a": "cancelled"}
    assert await within(30.0, work.returns("b")) == "b"


async def test_a_time_out_of_the_work_itself_is_not_that_of_the_deadline() -> None:
    async def times_out() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError) as raised:
        await within(30.0, times_out())
    assert not isinstance(raised.value, Overdue)


async def test_what_came_while_this_process_stood_still_is_in_time() -> None:
    answer = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.5, answer.set_result, "in time")
    waiting = asyncio.ensure_future(within(2.0, answer))
    await asyncio.sleep(0.01)
    time.sleep(3.0)  # noqa: ASYNC251  the process is to stand still
    assert await waiting == "in time"


ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(1), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ENDS, ids=repr)
async def test_an_end_that_users_code_raises_is_an_error_to_its_caller(error: BaseException) -> None:
    async def ends() -> None:
        raise error

    def ends_in_a_thread() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        await contained(ends())
    with pytest.raises(RuntimeError, match=type(error).__name__):
        await within(30.0, DaemonCalls("test", "key").call(ends_in_a_thread))


async def test_users_code_can_be_cancelled() -> None:
    waiting = asyncio.ensure_future(contained(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
