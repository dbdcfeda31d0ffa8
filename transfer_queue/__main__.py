"""The transfer queue process: ``python -m rl_async.transfer_queue --run RUN --address tcp://127.0.0.1:PORT``."""

import argparse
import asyncio
import contextlib
import logging
import secrets
import signal
import sys
from pathlib import Path

import zmq.asyncio

from rl_async.agent_loop.prompts import make_sources
from rl_async.configs.load import load_resolved
from rl_async.errors import UserError
from rl_async.lifeline import watch_lifeline
from rl_async.log import setup_logging
from rl_async.transfer_queue.journal import make_journal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.payloads import Payloads
from rl_async.transfer_queue.policy import QueueSettings
from rl_async.transfer_queue.server import QueueServer, bind
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import Feed

log = logging.getLogger("rl_async.queue")


async def run_queue(run: Path, address: str) -> None:
    """Serve the run's queue until SIGTERM or SIGINT. Raises UserError for a bad config, bad data or a taken port."""
    config = load_resolved(run / "config.yaml")
    journal = make_journal(config.queue.journal)
    source, eval_tasks = make_sources(config)
    payloads = Payloads()
    with contextlib.closing(Ledger(run / "ledger.jsonl")) as ledger, zmq.asyncio.Context() as context:
        feed = Feed(journal.append, ledger.append, payloads.consume)
        store = Store(QueueSettings.of(config), source, eval_tasks, feed)
        # Clients that outlive this process must notice that the next one does not know them.
        run_id = f"{config.name}-{secrets.token_hex(8)}"
        with bind(context, address) as socket:
            log.info("listening on %s", address)
            serving = asyncio.create_task(QueueServer(store, payloads, feed, run_id).serve(socket))
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await serving
    log.info("ended")


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rl_async.transfer_queue", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with config.yaml")
    parser.add_argument("--address", required=True, help="where to listen, e.g. tcp://127.0.0.1:5555")
    arguments = parser.parse_args(argv)
    try:
        asyncio.run(run_queue(arguments.run, arguments.address))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    watch_lifeline()
    setup_logging("queue")
    sys.exit(main())
