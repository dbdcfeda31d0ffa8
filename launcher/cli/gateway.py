"""``rl-async gateway``: adds a gateway to a run, lists the open episodes of one, ends an episode."""

import argparse
from pathlib import Path
from typing import Any

from rl_async.errors import UserError

USAGE = """rl-async gateway RUN [--host HOST] [--port PORT]
       rl-async gateway ls RUN [--url URL]
       rl-async gateway end RUN EPISODE [--url URL]"""


def add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.description = (
        "Add a gateway to a running run: agent programs play its episodes, each at a base_url of its own. Or list the "
        "open episodes, or end one, so that it is played again. See docs/how-to/gateway.md."
    )
    parser.add_argument("words", nargs="+", metavar="RUN", help="folder of a running run; behind ls or end, if given")
    parser.add_argument("--host", default="", help="address to listen on (default: agent.gateway.host, or loopback)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--url", default="", help="of the gateway to list or end episodes of (default: the run's own)")
    parser.set_defaults(command=_gateway, fail=parser.error)


def _gateway(arguments: argparse.Namespace) -> int:
    match arguments.words:
        case ["ls", run]:
            return _list(Path(run), arguments.url)
        case ["end", run, episode]:
            return _end(Path(run), arguments.url, episode)
        case [run] if run not in ("ls", "end"):
            from rl_async.agent_loop.gateway.server import attach

            return attach(Path(run), arguments.host, arguments.port)
    arguments.fail("give RUN, ls RUN, or end RUN EPISODE")
    return 2


def _list(run: Path, url: str) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rl_async.launcher.watch.terminal import printable

    listing = _request(run, url, "/episodes")
    episodes = listing["episodes"]
    if episodes:
        table = Table()
        for heading in ("episode", "task", "partition", "age", "silent for", "answers"):
            table.add_column(heading, justify="left" if heading in ("episode", "task", "partition") else "right")
        for one in sorted(episodes, key=lambda one: -one["age_s"]):
            ages = (f"{one['age_s']:.0f} s", f"{one['idle_s']:.0f} s", f"{one['answers']}")
            table.add_row(*(Text(printable(one[name])) for name in ("episode", "task_id", "partition")), *ages)
        Console().print(table)
    silence = listing["unattended_s"]
    print(
        f"{len(episodes)} episodes open, {listing['programs_waiting']} programs wait for one, "
        f"{listing['samples_waiting']} samples wait for a program"
        + (f"; no program has asked for {silence:.0f} s" if silence else "")
    )
    for one in listing["ignored"]:
        client, field = printable(one["client"]) or "a client without a name", printable(one["field"])
        print(f"{client}: {field} ignored in {one['requests']} requests (agent.gateway.unsupported)")
    return 0


def _end(run: Path, url: str, episode: str) -> int:
    answer = _request(run, url, "/episodes/give-back", {"episode": episode})
    if not answer["accepted"]:
        raise UserError(f"episode {episode}: {answer['reason']}")
    print(f"episode {episode} has ended; its sample is played again")
    return 0


def _request(run: Path, url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask a gateway of the run. Raises UserError if the run has none, or it does not answer or refuses."""
    from rl_async.gateway import Gateway
    from rl_async.process.http_auth import token_file
    from rl_async.process.run_files import gateway_url

    url = url or gateway_url(run)
    gateway = Gateway(url, token_file=token_file(run, "gateway"), start_s=3.0)
    try:
        status, answer = gateway.get(path) if body is None else gateway.post(path, body)
    except OSError as error:
        raise UserError(str(error)) from error
    if status != 200:
        raise UserError(f"{url}: {answer.get('error', {}).get('message', answer)}")
    return answer
