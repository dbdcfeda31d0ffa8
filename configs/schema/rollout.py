"""Sections `agent`, `rollout` and `eval.endpoint`: how episodes are played, and the engines that play them.

Also the names of the chat formats, which the registry in ``agent_loop/chat_formats`` makes, the MCP servers whose tools
the model may call (`agent.mcp`), and the language models that other servers have: users, opponents, endpoints.
"""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from rl_async.configs.engines import EngineKind
from rl_async.configs.schema import Config, Count, Positive, Seconds, doc

# The formats of the package renderers. `auto` tries them in this order, and takes the first of those that print alike.
LibraryName = Literal[
    "qwen3",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
    "llama-3",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "glm-5.3",
    "deepseek-v3",
    "deepseek-r1",
    "kimi-k2",
    "kimi-k2.5",
    "minimax-m2",
    "gemma4",
    "nemotron-3",
    "nemotron-3-ultra",
    "nemotron-3.5",
]
LIBRARY_NAMES: tuple[LibraryName, ...] = get_args(LibraryName)

PastReasoning = Literal["keep", "strip", "split"]
ChatFormatName = Literal["auto", "plain", "hermes", "gpt-oss", "mistral"] | LibraryName


class McpServerConfig(Config, frozen=True):
    """A server that is started by its ``command`` or reached at its ``url``."""

    name: Annotated[
        str, doc("Name in logs and errors, and prefix of its tools where another server has one of the same name.")
    ] = ""
    command: Annotated[
        tuple[str, ...] | str,
        doc("Program and arguments, as a list or a text that is split like one; no shell. {workspace}: a new folder."),
    ] = ()
    url: Annotated[str, doc("Instead of command: the address of a server with streamable HTTP.")] = ""
    env: Annotated[
        dict[str, str], doc("Variables for the command, which gets PATH, HOME, USER and TERM of ours besides.")
    ] = msgspec.field(default_factory=dict)
    env_from: Annotated[
        tuple[str, ...], doc("Variables of the environment to pass on to the command, such as keys; stored nowhere.")
    ] = ()
    headers_from: Annotated[
        dict[str, str],
        doc("HTTP headers for url, each with the NAME of the environment variable that holds its value."),
    ] = msgspec.field(default_factory=dict)
    allow: Annotated[tuple[str, ...], doc("The tools to offer, by the server's names for them; empty: all.")] = ()
    scope: Annotated[
        Literal["episode", "worker"],
        doc("Who shares a session: nobody, each episode gets its own; or all episodes of an agent worker."),
    ] = "episode"
    start_timeout_s: Annotated[Seconds, doc("Deadline for a session to begin, the command's start included.")] = 60.0


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


UnsupportedFields = Literal["ignore", "refuse"]
Quantization = Literal["none", "int8", "fp8"]


class GatewayConfig(Config, frozen=True):
    host: Annotated[
        str, doc("Address to listen on. Requests carry a token and nothing is encrypted (docs/reference/security.md).")
    ] = "127.0.0.1"
    port: Annotated[Count, doc("0: a free port.")] = 0
    idle_timeout_s: Annotated[
        Seconds,
        doc(
            "An episode fails, and is played again, if its program sends neither a request nor a heartbeat for so long."
        ),
    ] = 300.0
    max_answers: Annotated[Positive, doc("Completions per episode; further requests are refused.")] = 64
    max_body_bytes: Annotated[Positive, doc("Bytes of one request's body; a longer one is refused unread.")] = 8 << 20
    give_back: Annotated[
        tuple[int, ...] | Literal["all"],
        doc(
            "Exit codes with which a program says that its failure is not the policy's: its episode is played again. "
            "Other failures are graded with what the program did; all: none are (docs/how-to/gateway.md)."
        ),
    ] = (75, 126, 127)
    untrained: Annotated[
        tuple[str, ...],
        doc(
            "Patterns: a conversation whose first system message or first message of the user matches one is not "
            "trained, such as notes that a program makes for itself (docs/how-to/gateway.md)."
        ),
    ] = ()
    unsupported: Annotated[
        UnsupportedFields,
        doc("Fields that ask for other sampling than the run's: ignore (and count) them, or refuse the request."),
    ] = "ignore"


class EnvironmentHostsConfig(Config, frozen=True):
    processes: Annotated[
        Positive, doc("Host processes of each agent worker; its environments are spread over them.")
    ] = 1
    ready: Annotated[
        Count, doc("Environments of each worker to prepare before an episode wants one, by their class's prepare().")
    ] = 0
    starting: Annotated[
        Positive, doc("Environments of each worker that start at the same time; further ones wait.")
    ] = 8
    start_timeout_s: Annotated[
        Seconds,
        doc("Deadline of an environment's prepare(), and of its start: __init__, __aenter__ and reset together."),
    ] = 120.0
    python: Annotated[
        str,
        doc(
            "Python with verifiers 0.4, and rl-async beside it, whose environment plays through agent.gateway; "
            "empty: this one (docs/how-to/environments.md)."
        ),
    ] = ""


class AgentConfig(Config, frozen=True):
    loop: Annotated[
        str,
        doc(
            "single_turn, tool_agent, or your own as path.py:name; a task's agent_name overrides it (data.trust_code)."
        ),
    ] = "single_turn"
    tools: Annotated[tuple[str, ...], doc("Built-in tool names, or typed functions as path.py:name.")] = ()
    mcp: Annotated[
        tuple[McpServerConfig, ...],
        doc("Servers of the Model Context Protocol, whose tools join these; docs/how-to/mcp.md."),
    ] = ()
    chat_format: Annotated[
        ChatFormatName,
        doc("How the model writes turns, reasoning and calls (docs/reference/chat_formats.md); auto: by its template."),
    ] = "auto"
    past_reasoning: Annotated[
        PastReasoning,
        doc(
            "Reasoning of earlier turns in the context of the next: keep it as sampled; strip it where the chat "
            "template does, and begin a new row there; split: strip, and every turn is a row. "
            "See docs/reference/chat_formats.md."
        ),
    ] = "keep"
    unprinted_tools: Annotated[
        Literal["refuse", "allow"],
        doc("What to do if the chat template prints no tools; allow: the model learned by fine-tuning to call them."),
    ] = "refuse"
    environment: Annotated[
        str | None,
        doc("Built-in environment, or your own as path.py:name; a new one per episode (docs/how-to/environments.md)."),
    ] = None
    environment_options: Annotated[
        dict[str, Any], doc("Further arguments of the environment, by name, e.g. {render_mode: ansi}.")
    ] = msgspec.field(default_factory=dict)
    environment_hosts: Annotated[
        EnvironmentHostsConfig | None,
        doc("Environments live in processes of their own; {}: with defaults; null: in the worker's own process."),
    ] = None
    user: Annotated[
        UserConfig | None,
        doc(
            "The language model behind the environments simulated_user and collaborative_user "
            "(docs/how-to/environments.md)."
        ),
    ] = None
    opponents: Annotated[
        dict[str, SpeakerConfig],
        doc(
            "Who plays roles of a game in place of the policy, by role, with the keys of agent.user up to max_tokens, "
            "e.g. {seller: {url: ..., model: ...}}; {}: the policy plays all. See docs/how-to/environments.md."
        ),
    ] = msgspec.field(default_factory=dict)
    environment_timeout_s: Annotated[
        Seconds, doc("Deadline of one call of an environment: a step, its reward, its end; in-process its reset, too.")
    ] = 60.0
    max_turns: Annotated[Positive, doc("Assistant turns per episode.")] = 4
    max_tokens: Annotated[Positive, doc("Tokens per episode, including prompt and tool results.")] = 256
    max_parallel_calls: Annotated[
        Positive, doc("Tool calls run per turn; further ones get an error as their result.")
    ] = 4
    episode_timeout_s: Annotated[
        Seconds, doc("Deadline of one episode (agent.on_timeout). When colocated it must outlast a training step.")
    ] = 1800.0
    on_timeout: Annotated[
        Literal["retry", "truncate"],
        doc(
            "A training episode that misses its deadline: its sample fails and is played again; or it ends there, and "
            "is trained as far as it came (docs/reference/algorithms.md)."
        ),
    ] = "retry"
    tool_timeout_s: Annotated[Seconds, doc("Deadline of one tool call.")] = 10.0
    tool_response_tokens: Annotated[
        Positive, doc("Tokens of a tool result; a longer one is cut and says so at its end.")
    ] = 4096
    workers: Annotated[Positive, doc("Agent worker processes.")] = 1
    concurrency: Annotated[Positive, doc("Concurrent conversations per worker.")] = 256
    gateway: Annotated[
        GatewayConfig | None,
        doc("Agent programs play the episodes through an OpenAI-compatible gateway instead of agent workers."),
    ] = None


# The plan reads these flags in ``rollout.engine_args``.
DATA_PARALLEL = "--data-parallel-size"
NODES = "--nnodes"
# Engines name MOST_ALTERNATIVES (``rollout_server/api.py``), and vLLM keeps those that tie with the last one, too.
MOST_KEPT = 16


class TruncationConfig(Config, frozen=True, kw_only=True):
    """The tokens that are sampled at all, in training and evaluation. The trainer renormalises over the same ones."""

    # A single token would teach nothing.
    top_k: Annotated[int, Meta(ge=2, le=MOST_KEPT, description="The number of likeliest tokens that are sampled.")]
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="Of these, the likeliest whose probabilities sum to at least this.")
    ] = 1.0


class RolloutConfig(Config, frozen=True):
    engine: Annotated[
        EngineKind | tuple[EngineKind, ...], doc("Kind of rollout engine, or a list with one kind per engine.")
    ] = "embedded"
    engines: Annotated[Positive, doc("Engines: copies of the model, each with its own server and weight updates.")] = 1
    tensor_parallel: Annotated[
        Positive, doc("Ranks of an engine, a device each, among which every layer is divided (vLLM, SGLang).")
    ] = 1
    pipeline_parallel: Annotated[
        Positive, doc("Stages of an engine among which the layers are divided; each has tensor_parallel ranks (vLLM).")
    ] = 1
    expert_parallel: Annotated[
        Positive,
        doc("Parts into which a layer's experts are dealt to those ranks; 1: each expert is divided (vLLM: 1 or all)."),
    ] = 1
    quantization: Annotated[
        Quantization,
        doc("Layers of engines in 8 bits, quantised again by every update (docs/explanation/low_precision.md)."),
    ] = "none"
    python: Annotated[
        str, doc("Python with vLLM or SGLang, and rl-async beside it (scripts/install vllm); empty: this one.")
    ] = ""
    engine_args: Annotated[
        tuple[str, ...],
        doc(
            "Further command-line flags for vLLM or SGLang; --decode=eager or --decode=static for the embedded engine."
        ),
    ] = ()
    cache_bytes: Annotated[
        Positive | None,
        doc(
            "Memory for the KV cache of each rank of an engine; unset: 1 GiB on a CPU, on a GPU as much as "
            "max_batch_size sequences need, as far as there is room (docs/how-to/memory.md)."
        ),
    ] = None
    group_size: Annotated[Positive, doc("Trajectories sampled per task.")] = 16
    temperature: Annotated[float, Meta(gt=0, description="Sampling temperature for training.")] = 1.0
    truncation: Annotated[
        TruncationConfig | None, doc("Sample by top-k and top-p, and train on that distribution; unset: all tokens.")
    ] = None
    max_tokens: Annotated[Positive, doc("Sampled tokens per turn.")] = 64
    max_batch_size: Annotated[Positive, doc("Concurrent sequences per engine.")] = 256
    max_model_len: Annotated[Positive, doc("Longest sequence that an engine accepts, in tokens.")] = 256
    replay: Annotated[
        str, doc("Folder of a run whose recorded episodes are trained again, in their order, instead of sampling any.")
    ] = ""
    request_timeout_s: Annotated[
        Seconds, doc("Deadline of one generate request; time during which its engine sleeps does not count.")
    ] = 120.0
    start_timeout_s: Annotated[Seconds, doc("Deadline for an engine to start and answer its health probe.")] = 300.0
    port: Annotated[Count, doc("Port of the first engine; the others use the following ones. 0: free ports.")] = 0

    @property
    def data_parallel(self) -> int:
        """Copies of the model in an engine, by vLLM's ``--data-parallel-size`` in ``engine_args``; 0 if unreadable or
        given twice."""
        return self._count(DATA_PARALLEL)

    @property
    def nodes(self) -> int:
        """Processes that an engine's ranks are divided among, each perhaps on a machine of its own, by ``--nnodes`` in
        ``engine_args``; 0 if unreadable or given twice."""
        return self._count(NODES)

    def _count(self, wanted: str) -> int:
        found = []
        for word, following in zip(self.engine_args, (*self.engine_args[1:], ""), strict=False):
            flag, _, value = word.partition("=")
            if flag.replace("_", "-") == wanted:
                number = value or following
                found.append(int(number) if number.isdecimal() else 0)
        return found[0] if len(found) == 1 else int(not found)

    @property
    def ranks(self) -> int:
        """Processes of an engine that compute, each on a device of its own."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def cpu_cache_bytes(self) -> int:
        """``cache_bytes`` on a CPU."""
        return self.cache_bytes or 1 << 30
