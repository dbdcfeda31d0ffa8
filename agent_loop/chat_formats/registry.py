"""The chat formats by name, and which of them a tokenizer's chat template has."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.schema.rollout import AgentConfig, ChatFormatName
from rl_async.errors import ConfigError

FORMATS: dict[str, Callable[[PreTrainedTokenizerFast], ChatFormat]] = {"hermes": ChatRenderer}


def choose(tokenizer: PreTrainedTokenizerFast, name: ChatFormatName) -> ChatFormat:
    """Return the chat format ``name``, or with ``auto`` the one of the tokenizer's chat template."""
    return FORMATS["hermes" if name == "auto" else name](tokenizer)


def load_format(model_path: str, agent: AgentConfig) -> ChatFormat:
    """Make the chat format of a model folder.

    Raises ConfigError if the model's tokenizer or chat template cannot be used, or if the template does not print the
    tools that the config has.
    """
    try:
        chat = choose(PreTrainedTokenizerFast.from_pretrained(model_path), agent.chat_format)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model_path} has no usable tokenizer with a chat template: {error}") from error
    has_tools = bool(agent.tools or agent.environment)
    if has_tools and not chat.prints_tools and agent.unprinted_tools == "refuse":
        raise ConfigError(
            f"agent.tools: the chat template of {model_path} prints no tools, so the model would not know of them; "
            "use a model whose template does, or set agent.unprinted_tools=allow if this one learned to call them"
        )
    return chat
