"""`openenv:URL`: environments behind OpenEnv's servers."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rl_async.agent_loop.environments.adapters.seeds import seed_of
from rl_async.agent_loop.step import Step
from rl_async.messages import Task


class OpenEnv:
    """Options: ``action``, the field of the action that takes the answer (``message``), and ``observation``, the field
    that the model sees; without it, the whole observation as JSON. Every step's reward is its turn's.

    OpenEnv's generic client is used, so nothing of the environment is installed here, and none of its code runs.
    """

    def __init__(self, url: str, task: Task, options: Mapping[str, Any]) -> None:
        self._url, self._task = url, task
        self._client: Any = None
        self._action, self._observation = options.get("action", "message"), options.get("observation")

    async def reset(self) -> str:
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url)
        result = await self._client.reset(seed=seed_of(self._task))
        return self._shown(result.observation)

    async def step(self, answer: str) -> Step:
        result = await self._client.step({self._action: answer})
        return Step(self._shown(result.observation), reward=result.reward, done=bool(result.done))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        shown = observation if self._observation is None else observation[self._observation]
        return shown if isinstance(shown, str) else msgspec.json.encode(shown).decode()
