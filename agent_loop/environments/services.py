"""What the episodes of a worker share: the config, the sandbox, and the model that plays users."""

from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.environments.speakers import PolicySpeaker, ServedSpeaker, Speaker
from rl_async.configs.schema.run import RunConfig
from rl_async.rollout_server.api import Generator
from rl_async.sandbox.api import Sandbox
from rl_async.sandbox.registry import make_sandbox

USER = "agent.user"


class Services:
    """One for each worker. Without ``chat`` and ``generator`` the policy plays no user.

    Raises ConfigError if the environment lacks the API key of ``agent.user``.
    """

    def __init__(self, config: RunConfig, chat: ChatFormat | None = None, generator: Generator | None = None) -> None:
        self.config = config
        self._sandbox: Sandbox | None = None
        user = config.agent.user
        self.user: Speaker | None = None
        if user is not None and user.url:
            self.user = ServedSpeaker(user, USER)
        elif user is not None and chat is not None and generator is not None:
            self.user = PolicySpeaker(user, USER, config.rollout, chat, generator)

    def sandbox(self) -> Sandbox:
        """Return the sandbox, made at the first call. Raises ConfigError where none can be."""
        if self._sandbox is None:
            self._sandbox = make_sandbox(self.config.sandbox)
        return self._sandbox

    async def close(self) -> None:
        """Close connections."""
        if self.user is not None:
            await self.user.close()
