"""What the tests of single projects share."""

from typing import Any

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.environment_registry import get_environment
from rl_async.agent_loop.environments.session import Services, Session
from rl_async.agent_loop.tools.tool import Step
from rl_async.messages import Task
from tests.unit.agent_loop.fakes import run_config


def session(name: str, options: dict[str, Any] | None = None, **task: Any) -> Session:
    services = Services(run_config(environment=name, environment_options=options or {}))
    given = {"task_id": "t", "data_source": "d", "prompt": [], "ground_truth": "", **task}
    return Session(name, get_environment(name).make(Task(**given), services), 120.0)


async def answered(world: Session, *answers: str) -> list[tuple[Step, list[Message]]]:
    return [await world.step(answer) for answer in answers]
