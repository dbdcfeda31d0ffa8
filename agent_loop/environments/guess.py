"""The environment of the preset `guess`: a scripted user who thinks of a number and says where it lies."""

from rl_async.agent_loop.environments.host import Host
from rl_async.agent_loop.step import Step
from rl_async.errors import DataError
from rl_async.messages import Task

NO_NUMBER = "a number?"


def reply(answer: str, secret: int) -> str | None:
    """Return what the user says to a guess; None if it is right."""
    try:
        guess = int(answer)
    except ValueError:
        return NO_NUMBER
    if guess == secret:
        return None
    return "higher" if guess < secret else "lower"


class Guess:
    """The episode is worth 1 if one of its turns names ``extra_info.secret``."""

    def __init__(self, task: Task, host: Host) -> None:
        secret = task.extra.get("secret")
        if not isinstance(secret, int):
            raise DataError(f"task {task.task_id}: environment guess needs extra_info.secret, a whole number")
        self._secret, self._guesses, self._found = secret, 0, False

    async def step(self, answer: str) -> Step:
        self._guesses += 1
        said = reply(answer, self._secret)
        self._found = said is None
        return Step(said, done=self._found)

    async def reward(self) -> dict[str, float]:
        return {"score": float(self._found), "guesses": float(self._guesses)}
