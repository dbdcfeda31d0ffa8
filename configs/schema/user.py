"""Sections `agent.user`, `agent.opponents` and `eval.endpoint`: language models that servers have."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rl_async.configs.base import Config, Positive, Seconds, doc


class ServedModelConfig(Config, frozen=True, kw_only=True):
    """How a language model behind an OpenAI-compatible URL is asked."""

    api_key_env: Annotated[
        str, doc("NAME of the environment variable with the API key, which is stored nowhere; empty: no key.")
    ] = ""
    extra_body: Annotated[
        dict[str, Any], doc("Further keys of the request; null removes one, e.g. {max_tokens: null}.")
    ] = msgspec.field(default_factory=dict)
    timeout_s: Annotated[Seconds, doc("Deadline of one message, retries included.")] = 60.0
    attempts: Annotated[Positive, doc("Requests per message: 429, 5xx and lost connections are retried.")] = 4
    backoff_s: Annotated[Seconds, doc("Pause before the second attempt; doubles each time.")] = 1.0
    max_concurrent: Annotated[Positive, doc("Concurrent requests per worker.")] = 64


class EndpointConfig(ServedModelConfig, frozen=True, kw_only=True):
    """A model that is evaluated where it is served. Its answers have eval.temperature and rollout.max_tokens."""

    url: Annotated[str, doc("Base URL of an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1.")]
    model: Annotated[str, Meta(min_length=1, description="Name of the model at that server.")]
    timeout_s: Annotated[Seconds, doc("Deadline of one answer, retries included.")] = 600.0
    attempts: Annotated[Positive, doc("Requests per answer: 429, 5xx and lost connections are retried.")] = 8


class SpeakerConfig(ServedModelConfig, frozen=True, kw_only=True):
    """A language model that speaks: one that a server has, or the policy itself."""

    url: Annotated[
        str,
        doc("Base URL of an OpenAI-compatible server; empty: the policy itself, and what it says here trains nothing."),
    ] = ""
    model: Annotated[str, doc("Name of the model at that server.")] = ""
    temperature: Annotated[float, Meta(ge=0, description="Its sampling temperature.")] = 1.0
    max_tokens: Annotated[Positive, doc("Most tokens of one of its messages.")] = 256


class UserConfig(SpeakerConfig, frozen=True, kw_only=True):
    """The model that plays users."""

    system: Annotated[
        str,
        doc(
            "Template of the user's role and goal: {ground_truth} and the columns of extra_info, e.g. 'You want "
            "{wish}. Reveal it bit by bit. Write [DONE] once you have it.'"
        ),
    ]
    stop: Annotated[str, Meta(min_length=1, description="The user ends the conversation by writing this.")] = "[DONE]"
    score: Annotated[
        str,
        doc(
            "Template of a last question to the user, who answers it with a number; empty: the score is 1 if the user "
            "ended the conversation, else 0."
        ),
    ] = ""
    lowest: Annotated[float, doc("The answer to score that is worth 0; a lower one is an error.")] = 0.0
    highest: Annotated[float, doc("The answer to score that is worth 1; a higher one is an error.")] = 10.0
