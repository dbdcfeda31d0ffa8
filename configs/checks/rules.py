"""Combinations that cannot work, refused before anything starts. Each rule names the keys and the way out."""

import ipaddress
import re
from collections.abc import Iterator

from rl_async.configs.checks.algorithm import ALGORITHM_RULES, Rule
from rl_async.configs.checks.engine import ENGINE_RULES
from rl_async.configs.checks.finetune import finetune
from rl_async.configs.checks.fsdp2 import fsdp2, kernels
from rl_async.configs.checks.gateway import gateway_rule
from rl_async.configs.checks.megatron import data_parallel, megatron, sharing
from rl_async.configs.derived.data import labels, parts, points_of, weight_at
from rl_async.configs.derived.queue import is_closed, slack
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError


def _journal(c: RunConfig) -> str | None:
    if not re.fullmatch(r"rediss?://[^\s@?#]+", c.queue.redis_url):
        return (
            "queue.redis_url must be redis://HOST:PORT/NUMBER or rediss://..., without a password: that belongs into "
            "the environment variable RL_ASYNC_REDIS_PASSWORD"
        )
    return None


def _queue_host(c: RunConfig) -> str | None:
    """An address that can be bound as it stands, and client keys that are keys and have an effect."""
    try:
        ipaddress.IPv4Address(c.queue.host)
    except ValueError:
        return f"queue.host={c.queue.host} must be an IPv4 address: 127.0.0.1, 0.0.0.0, or one of this machine's"
    if c.queue.clients and not is_closed(c.queue):
        return "queue.clients has no effect on a queue that is open on loopback; set queue.curve=always too"
    for key in c.queue.clients:
        if not re.fullmatch(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", key):
            return f"queue.clients: {key!r} is not a public key; give the 40 characters of a client's .pub file"
    return None


def _shards(c: RunConfig) -> str | None:
    queue = c.queue
    if queue.shards and queue.host == "0.0.0.0":
        return "queue.shards tells workers where the shards are; set queue.host to the address that others reach"
    if not queue.shards and queue.replicas > 1:
        return f"queue.replicas={queue.replicas} are copies on payload shards, and queue.shards=0; set that too"
    if queue.shards and queue.replicas > queue.shards:
        return f"queue.replicas={queue.replicas} need as many shards; queue.shards={queue.shards}"
    return None


def _sampling(c: RunConfig) -> str | None:
    """Policies that would choose nothing, and windows that no batch fits into."""
    queue, batch = c.queue, c.data.train_batch_groups
    spare = slack(queue)
    if queue.sampling != "fifo" and not 1 <= spare < queue.max_staleness:
        return (
            f"queue.sampling={queue.sampling} with queue.max_staleness={queue.max_staleness} and queue.slack={spare} "
            "has nothing to choose from: it needs more than one batch of groups and a step by which one may be passed, "
            "so slack of 1 or more, and max_staleness above it"
        )
    if spare > queue.max_staleness:
        return f"queue.slack={spare} cannot be more than queue.max_staleness={queue.max_staleness}"
    slots = (queue.max_staleness - spare + 1) * batch
    if queue.sampling == "quota" and len(parts(c.data)) == 1:
        return "queue.sampling=quota needs data.path as a list of data sets, {path, weight} each; here is one"
    if queue.window and not batch <= queue.window < slots:
        return (
            f"queue.window={queue.window} must hold a batch (data.train_batch_groups={batch}) and fewer than the "
            f"{slots} groups that are there at most (queue.max_staleness - queue.slack + 1 batches); 0: no window"
        )
    return None


def _curriculum(c: RunConfig) -> str | None:
    sources = parts(c.data)
    for name, source in zip(labels(c.data), sources, strict=True):
        steps = [step for step, _ in source.schedule]
        if steps != sorted(set(steps)):
            return f"data.path: the steps of the schedule of {name} must rise: {steps}"
        if steps and source.weight != 1.0:
            return f"data.path: {name} has a schedule, so its weight={source.weight:g} would do nothing; leave it out"
        if steps and len(sources) == 1:
            return f"data.path: the schedule of {name} would do nothing, for there is no other data set"
    for step in sorted({step for source in sources for step, _ in points_of(source)}):  # between them it cannot be 0
        if not any(weight_at(points_of(source), step) for source in sources):
            return f"data.path: at step {step} every data set has weight 0; leave one above it"
    return None


def _transport(c: RunConfig) -> str | None:
    transport = c.weight_sync.transport
    if transport in ("gloo", "nccl") and c.mode == "colocated":
        return f"weight_sync.transport={transport} does not go with --mode colocated; use auto, ipc or disk"
    if transport == "nccl" and c.model.device == "cpu":
        return "weight_sync.transport=nccl needs GPUs, and model.device=cpu; use auto, gloo or disk"
    return None


def _weight_sync(c: RunConfig) -> str | None:
    """Options that would do nothing."""
    sync = c.weight_sync
    if sync.folder and sync.transport != "disk":
        return "weight_sync.folder is where weight_sync.transport=disk puts its files; set that too, or leave it out"
    if sync.adapters and c.trainer.lora is None:
        return "weight_sync.adapters sends what trainer.lora trains; set that too, or leave it out"
    if sync.adapters and sync.delta:
        return "weight_sync.delta finds nothing to leave out of weight_sync.adapters, which all change; use one of them"
    if sync.staged and c.mode == "colocated":
        return "weight_sync.staged lets engines decode meanwhile, and with --mode colocated they sleep; leave it out"
    if sync.waves > c.rollout.engines:
        return f"weight_sync.waves={sync.waves} needs as many engines; rollout.engines={c.rollout.engines}"
    if sync.waves > 1 and c.mode == "colocated":
        return "weight_sync.waves lets some engines decode meanwhile, and with --mode colocated all sleep; leave it out"
    return None


def _truncation(c: RunConfig) -> str | None:
    if c.rollout.top_p < 1 or c.rollout.top_k > 0:
        return (
            "rollout.top_p < 1 or rollout.top_k > 0 cut tokens off, whose true log-probability the trainer then "
            "cannot know; train with top_p=1 and top_k=0"
        )
    return None


def _publish_every(c: RunConfig) -> str | None:
    batches = c.queue.max_staleness - slack(c.queue) + 1
    if c.weight_sync.every > batches:
        return (
            f"weight_sync.every={c.weight_sync.every} would wait for ever: all slots are used up after "
            f"queue.max_staleness - queue.slack + 1 = {batches} steps; publish at least that often"
        )
    return None


def _minibatches(c: RunConfig) -> str | None:
    rows = c.data.train_batch_groups * c.rollout.group_size
    if c.finetune is None and rows < c.trainer.minibatches * data_parallel(c):
        return (
            f"{rows} trajectories per step (data.train_batch_groups * rollout.group_size) cannot fill "
            f"trainer.minibatches={c.trainer.minibatches} on {data_parallel(c)} copies of the model (trainer.ranks="
            f"{c.trainer.ranks})"
        )
    return None


def _lengths(c: RunConfig) -> str | None:
    if c.agent.max_tokens > c.rollout.max_model_len:
        return (
            f"agent.max_tokens={c.agent.max_tokens} is longer than an engine accepts "
            f"(rollout.max_model_len={c.rollout.max_model_len})"
        )
    return None


def _make(c: RunConfig) -> str | None:
    if c.data.make and not isinstance(c.data.path, str):
        return "data.make writes one file; data.path must then be a single path"
    return None


def _reward_models(c: RunConfig) -> str | None:
    """The scorers that need a section have one, with a URL that can be asked and holds no secret."""
    wanted = {term.name for term in c.reward.functions}
    if "reward_model" in wanted and c.reward.model is None:
        return "reward.functions: reward_model needs reward.model.path, the folder of a sequence classifier"
    if "judge" in wanted and c.reward.judge is None:
        return "reward.functions: judge needs reward.judge.url and reward.judge.model"
    model, judge = c.reward.model, c.reward.judge
    urls = {"reward.model.url": model.url if model else "", "reward.judge.url": judge.url if judge else ""}
    for key, url in urls.items():
        if url and not re.fullmatch(r"https?://[^\s@?#]+", url):
            return f"{key} must be http://... or https://..., without a password and without a query"
    return None


def _judge(c: RunConfig) -> str | None:
    judge = c.reward.judge
    if judge is None:
        return None
    if judge.api_key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", judge.api_key_env):
        return "reward.judge.api_key_env is the NAME of an environment variable (capitals), never the key itself"
    if "{response}" not in judge.template and "{conversation}" not in judge.template:
        return "reward.judge.template shows the judge nothing to grade; put {response} or {conversation} in it"
    if judge.highest <= judge.lowest:
        return f"reward.judge.highest={judge.highest:g} must be above reward.judge.lowest={judge.lowest:g}"
    return None


RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    *ENGINE_RULES,
    sharing,
    megatron,
    fsdp2,
    kernels,
    _journal,
    _queue_host,
    _shards,
    _sampling,
    _curriculum,
    _transport,
    _weight_sync,
    _truncation,
    _publish_every,
    _minibatches,
    _lengths,
    _make,
    _reward_models,
    _judge,
    gateway_rule,
    finetune,
)


def problems(config: RunConfig) -> Iterator[str]:
    """Every broken rule, as a message."""
    for rule in RULES:
        if message := rule(config):
            yield message


def check(config: RunConfig) -> None:
    """Raise ConfigError with all broken rules."""
    found = list(problems(config))
    if found:
        raise ConfigError("; ".join(found))
