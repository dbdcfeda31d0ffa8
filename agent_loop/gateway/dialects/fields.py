"""The fields of each dialect's requests, as data, and what becomes of those that a run cannot obey."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from rl_async.configs.schema.rollout import UnsupportedFields
from rl_async.errors import RequestRefused

log = logging.getLogger("rl_async.gateway")

COUNTED = 1000  # pairs of client and field; clients choose both names
# A request may have so many fields: clients choose their names, and each is looked up.
MOST_FIELDS = 256
SHOWN = 80  # characters of a name or value in logs and refusals


class Field(NamedTuple):
    """A field that a run does not obey. ``neutral``: values that ask for what it does anyway; None: any value does.

    Other values would change the meaning of an answer if there is a ``way_out``, which says what to do instead: they
    are refused. Without one, `agent.gateway.unsupported` decides.
    """

    neutral: tuple[Any, ...] | None = ()
    way_out: str = ""
    code: str = "unsupported_value"  # of the refusal


_NO_EFFECT = Field(None)
_LOGPROBS = "leave it out: rows have the log-probability of every sampled token, but answers have none"
_TEXT_ONLY = "leave it out: the policy reads and writes text only"
_SERVER_TOOL = "leave it out: the gateway runs no tools; offer a function that your program runs"
_OWN_TURN = "the policy samples whole turns; end with a user's message or a tool's result, and say there how to begin"
_SAMPLING: dict[str, Field] = {
    "top_k": Field((0, -1)),
    "min_p": Field((0,)),
    "frequency_penalty": Field((0,)),
    "presence_penalty": Field((0,)),
    "repetition_penalty": Field((1,)),
    "length_penalty": Field((1,)),
    "logit_bias": Field(({},)),
    "min_tokens": Field((0,)),
    "ignore_eos": Field((False,)),
    "stop_token_ids": Field(([],)),
    "use_beam_search": Field((False,)),
    "skip_special_tokens": Field((True,)),
    "spaces_between_special_tokens": Field((True,)),
    "include_stop_str_in_output": Field((False,)),
}
# A field that is in no table, and that no dialect reads, is one that a run does not obey.
OPENAI: dict[str, Field] = {
    # A seed would make the members of a group equal, which leaves nothing to compare.
    **dict.fromkeys(("seed", "user", "metadata", "store", "service_tier", "safety_identifier"), _NO_EFFECT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prediction"), _NO_EFFECT),
    **_SAMPLING,
    "response_format": Field(({"type": "text"},)),
    "verbosity": Field(("medium",)),
    "parallel_tool_calls": Field((True,)),
    "tool_choice": Field(("auto", "none")),
    "chat_template_kwargs": Field(({},)),
    "n": Field((1,), "send more requests instead: each answer to the same messages is a row of its own"),
    "best_of": Field((1,), "send more requests instead, and choose among the answers"),
    "logprobs": Field((False,), _LOGPROBS),
    "top_logprobs": Field((0,), _LOGPROBS),
    "prompt_logprobs": Field((), _LOGPROBS),
    "modalities": Field((["text"],), _TEXT_ONLY),
    "audio": Field((), _TEXT_ONLY),
    "functions": Field(([],), "use tools"),
    "function_call": Field(("auto", "none"), "use tools and tool_choice"),
    "web_search_options": Field((), _SERVER_TOOL),
    "chat_template": Field((), "leave it out: the run's model has one (docs/reference/chat_formats.md)"),
    "add_generation_prompt": Field((True,), _OWN_TURN),
    "continue_final_message": Field((False,), _OWN_TURN),
}
COMPLETIONS: dict[str, Field] = {
    **dict.fromkeys(("seed", "user", "metadata", "store", "service_tier", "safety_identifier"), _NO_EFFECT),
    **_SAMPLING,
    "n": OPENAI["n"],
    "best_of": OPENAI["best_of"],
    "logprobs": Field((), _LOGPROBS),
    "prompt_logprobs": OPENAI["prompt_logprobs"],
    "echo": Field((False,), "leave it out: your program has the prompt"),
    "suffix": Field(("",), "the policy continues a prompt; it fills no gaps"),
    "add_special_tokens": Field((False,)),
}
RESPONSES: dict[str, Field] = {
    **dict.fromkeys(("metadata", "user", "service_tier", "safety_identifier", "client_metadata"), _NO_EFFECT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), _NO_EFFECT),
    **dict.fromkeys(("stream_options", "max_tool_calls"), _NO_EFFECT),  # of OpenAI's own network and tools
    **_SAMPLING,
    "reasoning": Field(({}, {"summary": "auto"})),
    "truncation": Field(("disabled",)),
    "parallel_tool_calls": Field((True,)),
    "tool_choice": Field(("auto", "none")),
    "top_logprobs": Field((0,), _LOGPROBS),
    "background": Field((False,), "leave it out: an answer comes with its request, or as a stream"),
    "conversation": Field((), "name the previous response instead (previous_response_id)"),
    "prompt": Field((), "leave it out: nothing is stored here; send instructions and input"),
}
RESPONSES_TEXT: dict[str, Field] = {  # the members of `text`
    "format": Field(({}, {"type": "text"})),
    "verbosity": Field(("medium",)),
}
ANTHROPIC: dict[str, Field] = {
    **dict.fromkeys(("metadata", "service_tier", "cache_control", "inference_geo"), _NO_EFFECT),
    **_SAMPLING,
    "tool_choice": Field(
        tuple(
            {"type": kind, **more} for kind in ("auto", "none") for more in ({}, {"disable_parallel_tool_use": False})
        )
    ),
    # The vendor's client knows this code, and sends whole conversations from then on.
    "thread": Field((), "send the whole conversation in each request", "thread_unsupported_request"),
    "context_management": Field(({}, {"edits": []})),
    "output_config": Field(({},)),
    "mcp_servers": Field(([],), _SERVER_TOOL),
    "container": Field((), _SERVER_TOOL),
}


def unobeyed(fields: Mapping[str, Any], read: Collection[str], table: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields that ask for something that a run does not do. ``read`` are those that have an effect.

    Raises RequestRefused for a field without which the answer would mean something else, and for too many fields.
    """
    if len(fields) > MOST_FIELDS:
        raise RequestRefused(f"there are more than {MOST_FIELDS} fields", code="invalid_request")
    found = {}
    for name, value in fields.items():
        if value is None or (name in read and name not in table):
            continue
        field = table.get(name, Field())
        if field.neutral is None or value in field.neutral or _given(value) in field.neutral:
            continue
        if field.way_out:
            raise not_supported(f"{name[:SHOWN]}={_shown(value)}", field.way_out, name, field.code)
        found[name] = value
    return found


def _given(value: Any) -> Any:
    """Return the value without members of null, which clients write for options they leave unset."""
    if not isinstance(value, dict):
        return value
    return {name: _given(member) for name, member in value.items() if member is not None}


def not_supported(what: str, way_out: str, param: str = "messages", code: str = "unsupported_value") -> RequestRefused:
    """Return the refusal of ``what``, which says what to do instead."""
    return RequestRefused(f"{what} is not supported: {way_out}", code=code, param=param)


def tool_refused(kind: str) -> RequestRefused:
    """Return the refusal of a tool that is no function of the agent program."""
    return not_supported(f"a tool of type {kind[:SHOWN]}", _SERVER_TOOL, "tools")


def content_refused(kind: str, param: str) -> RequestRefused:
    """Return the refusal of a part of a message that is no text."""
    return not_supported(f"content of type {kind[:SHOWN]}", _TEXT_ONLY, param)


def prefill_refused(param: str) -> RequestRefused:
    """Return the refusal of messages that end with the assistant's."""
    return not_supported("prefill", _OWN_TURN, param)


class UnobeyedFields:
    """Drops, counts and logs fields that cannot be obeyed, or refuses them (`agent.gateway.unsupported`)."""

    def __init__(self, choice: UnsupportedFields) -> None:
        self._choice = choice
        self.dropped: Counter[tuple[str, str]] = Counter()  # requests, by client and field

    def settle(self, fields: Mapping[str, Any], client: str) -> None:
        """Drop and count ``fields`` of a request of ``client``. Raises RequestRefused if they are to be refused."""
        for name, value in fields.items():
            if self._choice == "refuse":
                raise not_supported(
                    f"{name[:SHOWN]}={_shown(value)}",
                    f"tokens are trained on, so they come from the run's own distribution; leave {name[:SHOWN]} out, "
                    "or let the gateway drop it: agent.gateway.unsupported=ignore (fields: docs/how-to/gateway.md)",
                    name,
                )
            key = (client[:SHOWN], name[:SHOWN])
            if key not in self.dropped and len(self.dropped) >= COUNTED:
                key = ("others", "others")
            self.dropped[key] += 1
            if self.dropped[key] == 1:
                log.warning(
                    "%r asks for %r=%s, which the gateway ignores (agent.gateway.unsupported)", *key, _shown(value)
                )

    def listing(self) -> list[dict[str, Any]]:
        """Return how many requests of each client had which field, the most frequent first."""
        return [
            {"client": client, "field": field, "requests": requests}
            for (client, field), requests in self.dropped.most_common()
        ]


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:SHOWN]
