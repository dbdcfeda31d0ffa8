"""Whole conversations as a reward model's token ids, the same for training, serving and scoring.

AutoTokenizer would import torch, so this uses PreTrainedTokenizerFast.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from rl_async.errors import ConfigError
from rl_async.messages import Turn
from rl_async.template_tokens import TemplateTokens

Message = dict[str, Any]


def load_tokenizer(path: str, key: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder. Raises ConfigError, naming ``key``, if it or its chat template is missing."""
    if not Path(path).is_dir():  # Transformers would look for it on the Hub
        raise ConfigError(f"{key}: there is no folder {path}")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{key}: {path} has no usable tokenizer: {reason}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"{key}: the tokenizer in {path} has no chat template; save one with it")
    return tokenizer


def as_messages(turns: Sequence[Turn]) -> list[Message]:
    """Convert an episode's turns to chat messages."""
    return [{"role": turn.role, "content": turn.text} for turn in turns]


class ConversationEncoder:
    """Encodes finished conversations by the tokenizer's chat template; only the template writes special tokens.

    What a policy says is text from outside, too: it must not forge turns for the model that grades it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._tokens = tokenizer, TemplateTokens(tokenizer)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Encode one conversation; no special tokens are added."""
        escaped = [self._tokens.escape(message) for message in messages]
        return self._tokens.encode(str(self._tokenizer.apply_chat_template(escaped, tokenize=False)))
