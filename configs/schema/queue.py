"""Section `queue`: the transfer queue, its staleness bound, journal, access and limits."""

from typing import Annotated, Literal

from rl_async.configs.schema import Config, Count, Positive, Seconds, doc


class SqliteConfig(Config, frozen=True):
    """The journal in files."""

    folder: Annotated[
        str,
        doc(
            "Folder of the journal, under the run's name; empty: the run folder. On a disk of the "
            "queue's host, since file systems that hosts share (NFS, Lustre, ...) are refused."
        ),
    ] = ""
    synchronous: Annotated[
        Literal["normal", "full", "off"],
        doc(
            "normal: whatever was acknowledged survives a crash of the queue; a power cut may lose the last moments. "
            "full: it survives both, and each flush waits for the disk. off: a power cut may corrupt the whole file."
        ),
    ] = "normal"


class RedisConfig(Config, frozen=True):
    """The journal on a server."""

    url: Annotated[
        str, doc("Server that keeps the journal; a password comes from the variable RL_ASYNC_REDIS_PASSWORD.")
    ] = "redis://127.0.0.1:6379/0"
    replicas: Annotated[
        Count,
        doc(
            "Replicas of that server that must have what is acknowledged (Redis' WAIT). With 0, promoting a replica "
            "may lose the last moments; the queue notices and ends, and --resume continues from the checkpoint."
        ),
    ] = 0


class QueueConfig(Config, frozen=True):
    max_staleness: Annotated[
        Count, doc("Bound on the staleness of any trained token, in steps. 0: on-policy, 1: one-step-off-policy.")
    ] = 1
    journal: Annotated[
        Literal["memory", "sqlite", "redis"],
        doc(
            "Where the queue's state is recorded: nowhere, in the run folder, or on a Redis server. With sqlite and "
            "redis, a queue that was killed is restarted and the run goes on (docs/explanation/transfer_queue.md)."
        ),
    ] = "sqlite"
    sqlite: Annotated[SqliteConfig | None, doc("Of journal=sqlite; null: the defaults.")] = None
    redis: Annotated[RedisConfig | None, doc("Of journal=redis; null: the defaults.")] = None
    on_straggler: Annotated[
        Literal["wait", "drop", "mask"],
        doc("When passing an unfinished group would break the bound: wait for it, drop it, or mask its stale tokens."),
    ] = "wait"
    sampling: Annotated[
        Literal["fifo", "freshest", "priority", "quota"],
        doc(
            "Which ready groups a batch takes, after those that the staleness bound forces: the oldest, the newest, "
            "those of the highest priority (column priority of the data), or each data set's share of data.path. All "
            "but fifo need a max_staleness of at least 2."
        ),
    ] = "fifo"
    window: Annotated[
        Count,
        doc(
            "A batch is taken from the oldest this many groups, and waits for unfinished ones among them instead of "
            "passing them over. At least data.train_batch_groups; 0: whatever is ready, within the bound."
        ),
    ] = 0
    lease_s: Annotated[Seconds, doc("A worker that is silent for this long loses its leases.")] = 15.0
    max_attempts: Annotated[Positive, doc("A group that fails this often is dead-lettered with its error.")] = 3
    max_bytes: Annotated[
        Positive,
        doc(
            "Payload bytes held: of unfinished groups, and of those trained since the last checkpoint. Beyond it, "
            "groups are admitted only for the next batch (counted as queue/short_of_bytes)."
        ),
    ] = 1 << 30
    host: Annotated[
        str,
        doc(
            "IPv4 address to listen on; 0.0.0.0: all. On loopback, socket files that only this user can open take the "
            "place of an address, unless queue.curve=always."
        ),
    ] = "127.0.0.1"
    port: Annotated[Count, doc("0: a free port.")] = 0
    curve: Annotated[
        Literal["auto", "always"],
        doc(
            "Clients always need a key. auto: connections are encrypted if queue.host is not loopback; always: on "
            "loopback too, for clients that cannot open this machine's socket files, as in another container."
        ),
    ] = "auto"
    keys: Annotated[
        str,
        doc("Folder made by `rl-async queue keygen`. Empty: keys/ in the run folder, made when the run starts."),
    ] = ""
    shards: Annotated[
        Count,
        doc(
            "Processes that keep the payloads, so that these pass through no other process; 0: the queue keeps them. "
            "Trajectories of a lost shard are read from a replica or generated again."
        ),
    ] = 0
    replicas: Annotated[
        Positive, doc("Shards that keep each payload; with 2, one shard may be lost without losing data.")
    ] = 1
