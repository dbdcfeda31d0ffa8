"""The chat formats by name."""

from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.chat_formats.hermes import HERMES

CHAT_FORMATS: dict[str, ChatFormat] = {"hermes": HERMES}
DEFAULT = "hermes"
