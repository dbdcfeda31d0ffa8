"""The chat formats by name, and which of them a tokenizer's chat template has."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.schema.rollout import ChatFormatName
from rl_async.errors import ConfigError

FORMATS: dict[str, Callable[[PreTrainedTokenizerFast], ChatFormat]] = {"hermes": ChatRenderer}


def choose(tokenizer: PreTrainedTokenizerFast, name: ChatFormatName) -> ChatFormat:
    """Return the chat format ``name``, or with ``auto`` the one of the tokenizer's chat template."""
    return FORMATS["hermes" if name == "auto" else name](tokenizer)


def load_format(model_path: str, name: ChatFormatName = "auto") -> ChatFormat:
    """Make the chat format of a model folder.

    Raises ConfigError if the model's tokenizer or chat template cannot be used.
    """
    try:
        return choose(PreTrainedTokenizerFast.from_pretrained(model_path), name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model_path} has no usable tokenizer with a chat template: {error}") from error
