"""Rules for the section `queue`: where it listens, who may connect, and what its sampling can choose from."""

import ipaddress
import re

from rl_async.configs.derived.data import parts
from rl_async.configs.derived.queue import is_encrypted, slack
from rl_async.configs.schema.run import RunConfig


def journal(c: RunConfig) -> str | None:
    if not re.fullmatch(r"rediss?://[^\s@?#]+", c.queue.redis_url):
        return (
            "queue.redis_url must be redis://HOST:PORT/NUMBER or rediss://..., without a password, which belongs in "
            "the environment variable RL_ASYNC_REDIS_PASSWORD"
        )
    return None


def access(c: RunConfig) -> str | None:
    """Require an address that can be bound as it stands, and client keys that are well-formed and have an effect."""
    try:
        ipaddress.IPv4Address(c.queue.host)
    except ValueError:
        return f"queue.host={c.queue.host} must be an IPv4 address: 127.0.0.1, 0.0.0.0, or one of this machine's"
    if c.queue.port and not is_encrypted(c.queue):
        return "queue.port has no effect on a queue that clients reach by a socket file; also set queue.curve=always"
    for line in c.queue.clients:
        if not re.fullmatch(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40} [a-z]+", line):
            return f"queue.clients: {line!r} is not a public key with a role; use the line in a client's .pub file"
    return None


def shards(c: RunConfig) -> str | None:
    queue = c.queue
    if queue.shards and queue.host == "0.0.0.0":
        return "queue.shards advertises the shards' address to workers; set queue.host to one that they can reach"
    if not queue.shards and queue.replicas > 1:
        return f"queue.replicas={queue.replicas} are copies on payload shards, and queue.shards=0; set both"
    if queue.shards and queue.replicas > queue.shards:
        return f"queue.replicas={queue.replicas} needs at least as many shards; queue.shards={queue.shards}"
    return None


def sampling(c: RunConfig) -> str | None:
    """Refuse sampling policies that would have no choice, and windows that hold no batch."""
    queue, batch = c.queue, c.data.train_batch_groups
    spare = slack(queue)
    if queue.sampling != "fifo" and not 1 <= spare < queue.max_staleness:
        return (
            f"queue.sampling={queue.sampling} with queue.max_staleness={queue.max_staleness} and queue.slack={spare} "
            "has nothing to choose from: it needs a queue.slack of 1 or more, by which a batch may pass over a ready "
            "group, and a queue.max_staleness above that, so that more than one batch of groups is alive"
        )
    if spare > queue.max_staleness:
        return f"queue.slack={spare} cannot be more than queue.max_staleness={queue.max_staleness}"
    slots = (queue.max_staleness - spare + 1) * batch
    if queue.sampling == "quota" and len(parts(c.data)) == 1:
        return "queue.sampling=quota needs data.path to be a list of data sets, {path, weight} each; it is a single one"
    if queue.window and not batch <= queue.window < slots:
        return (
            f"queue.window={queue.window} must be at least one batch (data.train_batch_groups={batch}) and less than "
            f"the {slots} groups that are alive at most (queue.max_staleness - queue.slack + 1 batches); 0: no window"
        )
    return None


def leases(c: RunConfig) -> str | None:
    """Refuse leases that end while their episodes may still be played."""
    if c.queue.max_lease_s < max(c.queue.lease_s, c.agent.episode_timeout_s):
        return (
            f"queue.max_lease_s={c.queue.max_lease_s:g} must be at least queue.lease_s={c.queue.lease_s:g} and "
            f"agent.episode_timeout_s={c.agent.episode_timeout_s:g}"
        )
    return None


QUEUE_RULES = (journal, leases, access, shards, sampling)
