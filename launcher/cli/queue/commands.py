"""``rl-async queue ...``: the options. What the commands do is in ``actions.py``, which is imported when one runs."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rl_async.process.http_auth import make_tokens
from rl_async.transfer_queue.auth.roles import ROLES

STATES = ("waiting", "leased", "ready", "reserved", "committed")
TIMEOUT_S = 60.0


def add_queue_commands(parser: argparse.ArgumentParser) -> None:
    parser.description = "Inspect the transfer queue of a running run and act on it, or serve one without a run."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    status = _command(commands, "status", "counts by state, ages, rates, dead letters", _status)
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument("--watch", type=float, nargs="?", const=2.0, metavar="S", help="again every S seconds (2)")

    ls = _command(commands, "ls", "the groups that the queue holds", _ls)
    ls.add_argument("--state", choices=STATES, default="", help="only those")
    ls.add_argument("--json", action="store_true", help="one object per line")

    peek = _command(commands, "peek", "a stored trajectory, which stays in the queue", _peek)
    peek.add_argument("group", type=int, metavar="GROUP")
    peek.add_argument("sample", type=int, nargs="?", metavar="SAMPLE", help="default: the first one stored")

    requeue = _command(commands, "requeue", "admit the task of a dead letter again", _requeue)
    requeue.add_argument("group", type=int, metavar="GROUP", help="as `rl-async queue status` shows it")

    drain = _command(commands, "drain", "stop admission; admitted groups are still finished and trained", _drain)
    drain.add_argument("--undo", action="store_true", help="admit again")

    tail = _command(
        commands, "tail", "one line of JSON for each group that is trained, as one of several readers", _tail
    )
    tail.add_argument("--consumer", required=True, metavar="NAME", help="name under which the queue keeps the position")
    tail.add_argument("--oldest", action="store_true", help="a new consumer begins with the oldest group")
    tail.add_argument("--forget", action="store_true", help="print nothing; remove the consumer")

    export = _command(commands, "export", "write the stored rows as Parquet; they stay in the queue", _export)
    export.add_argument("file", type=Path, metavar="FILE.parquet")

    bring = _command(commands, "import", "put an exported file into a queue", _import)
    bring.add_argument("file", type=Path, metavar="FILE.parquet")
    bring.add_argument("--as", dest="kind", choices=("ready", "tasks"), default="ready", help="default: ready groups")
    bring.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help=f"wait for room for a group ({TIMEOUT_S:g})"
    )
    _add_serve(commands.add_parser("serve", help="a queue without a run"))

    keygen = commands.add_parser("keygen", help="make the keys and tokens of a run's own processes, and of a client")
    keygen.add_argument("folder", type=Path, metavar="FOLDER", help="RUN/keys, or for queue.keys; existing ones stay")
    keygen.add_argument("--client", metavar="NAME", help="of one more client, too: FOLDER/NAME.key")
    keygen.add_argument("--role", choices=ROLES, default="worker", help="what that client may do (default: worker)")
    keygen.set_defaults(command=_keygen)


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    do: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    parser.add_argument("run", metavar="RUN", help="run folder, folder of a served queue, or its tcp://HOST:PORT")
    parser.set_defaults(command=do)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve until interrupted. Producers submit tasks or groups: docs/explanation/transfer_queue.md."
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="keep all of it there (default: memory)")
    parser.add_argument("--tasks", metavar="FILE", help="Parquet or JSONL in the columns of data.path (default: none)")
    parser.add_argument("--group-size", type=int, default=1, metavar="N", help="samples per task (default: 1)")
    parser.add_argument("--batch-groups", type=int, default=1, metavar="N", help="groups per batch (default: 1)")
    parser.add_argument("--max-staleness", type=int, default=1, metavar="N", help="batches ahead (default: 1)")
    parser.add_argument(
        "--lease", type=float, default=15.0, metavar="S", help="after which a silent worker is lost (default: 15)"
    )
    parser.add_argument(
        "--sampling", choices=("fifo", "freshest", "priority"), default="fifo", help="as queue.sampling (default: fifo)"
    )
    parser.add_argument("--window", type=int, default=0, metavar="N", help="as queue.window (default: none)")
    parser.add_argument("--port", type=int, default=0, help="on this machine (default: a free one)")
    parser.add_argument("--metrics-port", type=int, default=0, help="for Prometheus, on this machine (default: none)")
    parser.set_defaults(command=_serve, steady=True)


def _status(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import status

    return status(arguments.run, as_json=arguments.json, every_s=arguments.watch)


def _ls(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import ls

    return ls(arguments.run, arguments.state, as_json=arguments.json)


def _peek(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import peek

    return peek(arguments.run, arguments.group, arguments.sample)


def _requeue(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import requeue

    return requeue(arguments.run, arguments.group)


def _drain(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import drain

    return drain(arguments.run, on=not arguments.undo)


def _tail(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import forget, tail

    if arguments.forget:
        return forget(arguments.run, arguments.consumer)
    return tail(arguments.run, arguments.consumer, oldest=arguments.oldest)


def _export(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import write

    return write(arguments.run, arguments.file)


def _import(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import bring

    return bring(arguments.run, arguments.file, arguments.kind, arguments.timeout)


def _serve(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.queue.actions import serve
    from rl_async.transfer_queue.server import standalone_settings

    settings = standalone_settings(
        group_size=arguments.group_size,
        batch_groups=arguments.batch_groups,
        max_staleness=arguments.max_staleness,
        lease_s=arguments.lease,
        sampling=arguments.sampling,
        window=arguments.window,
    )
    return serve(settings, arguments.tasks, arguments.folder, arguments.port, arguments.metrics_port)


def _keygen(arguments: argparse.Namespace) -> int:
    from rl_async.transfer_queue.auth.keys import make_client_keys, make_keys

    if arguments.client is None:
        made = [*make_keys(arguments.folder), *make_tokens(arguments.folder)]
    else:
        made = make_client_keys(arguments.folder, arguments.client, arguments.role)
    print(f"wrote {', '.join(map(str, made))}" if made else f"{arguments.folder} already has these keys")
    return 0
