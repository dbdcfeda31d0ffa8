"""How many tokens a task's prompt has: its messages and calls, the schemas of its tools, and what the template adds."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError
from rl_async.messages import Task
from rl_async.transfer_queue.data.chat_messages import Message, for_templates

PromptLength = Callable[[Task], int]
Schemas = Mapping[str, dict[str, Any]]  # by the name that a config or a task gives the tool

TOOLS_FILE = "tools.json"  # in a run's folder: the schemas of the tools that tasks may name
PER_MESSAGE = 32  # tokens that a template prints around a message or call, at most
_NOTHING: Message = {"role": "user", "content": "x"}


def read_schemas(run: Path) -> Schemas:
    """Read the schemas that the launcher wrote; none if it did not start this process."""
    file = run / TOOLS_FILE
    return msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, Any]]) if file.is_file() else {}


def prompt_length(config: RunConfig, schemas: Schemas) -> PromptLength:
    """Return a bound on a prompt's tokens, exact if it may exceed ``data.max_prompt_tokens``.

    Only then the tokenizer is loaded. The tools of MCP servers and environments are unknown until an episode begins.
    """
    longest, template = config.data.max_prompt_tokens, _template_bytes(Path(config.model.path))
    exact: list[_Tokenizer] = []

    def length(task: Task) -> int:
        names = config.agent.tools if task.tools is None else task.tools
        tools = [schemas[name] for name in names if name in schemas]
        said = _bound(task.prompt)
        if (bound := said + template + len(json.dumps(tools, ensure_ascii=False).encode())) <= longest:
            return bound
        if not exact:
            exact.append(_Tokenizer(config.model.path))
        if (bound := said + exact[0].added(tools)) <= longest:
            return bound
        return exact[0].count(task.prompt, tools)

    return length


def _bound(messages: Sequence[Message]) -> int:
    """Bound the tokens of messages alone: a token has at least one byte."""
    return sum(len(msgspec.json.encode(message)) + PER_MESSAGE for message in messages)


def _template_bytes(model: Path) -> int:
    """Return the size of the files that may have a model's chat template, of which it prints a part by itself."""
    own = model / "chat_template.jinja"
    files = [own] if own.is_file() else [model / "tokenizer_config.json"]
    return sum(file.stat().st_size for file in files if file.is_file())


class _Tokenizer:
    def __init__(self, model: str) -> None:
        from transformers import PreTrainedTokenizerFast

        from rl_async.template_tokens import TemplateTokens

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        self._tokens = TemplateTokens(self._tokenizer)
        self._added: dict[str, int] = {}

    def added(self, tools: Sequence[dict[str, Any]]) -> int:
        """Return the tokens of what the template prints of itself and the tools, before the shortest conversation."""
        key = json.dumps(tools)
        if key not in self._added:
            self._added[key] = self.count([_NOTHING], tools)
        return self._added[key]

    def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
        """Count the tokens of a prompt. Raises DataError if the template refuses it."""
        import jinja2

        given = list(messages)
        try:
            text = self._render(for_templates(given), tools)
        except (jinja2.TemplateError, TypeError, ValueError):
            # Some templates take arguments as text.
            try:
                text = self._render(given, tools)
            except (jinja2.TemplateError, TypeError, ValueError) as error:
                raise DataError(f"the model's chat template refuses it: {error}") from error
        return len(self._tokens.encode(text))

    def _render(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> str:
        escaped = [self._tokens.escape(message) for message in messages]
        offered = [self._tokens.escape(tool) for tool in tools]
        return str(
            self._tokenizer.apply_chat_template(
                escaped, tools=offered or None, tokenize=False, add_generation_prompt=True
            )
        )
