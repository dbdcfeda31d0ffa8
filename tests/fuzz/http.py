"""Hostile requests for every HTTP server of a run, over real sockets.

Whatever is sent: no status from 500 but 503, no traceback in an answer or in the log, an error is JSON in the client's
format, no secret is echoed or logged, a stranger changes nothing, memory does not grow, and a valid client then gets
what it got before.
    python -m tests.fuzz.http [--requests N] [--seed N] [--server NAME]
"""

import argparse
import itertools
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.rollout_server.vllm.client import MIN_VERSION_HEADER
from tests.conftest import make_model
from tests.fuzz.http_attacks import Attack, attack, judge, send, shown
from tests.fuzz.http_servers import Target, targets

GROWTH_BYTES = 128 << 20
AT_ONCE = 24


class Heard(logging.Handler):
    """Everything that is logged in this process, and what threads died of."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.wrong: list[str] = []
        self.secrets: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what should not be in a log."""
        text = logging.Formatter().format(record)
        if record.exc_info or record.levelno >= logging.ERROR or any(secret in text for secret in self.secrets):
            self.wrong.append(text[-3000:])

    def __enter__(self) -> "Heard":
        logging.getLogger().addHandler(self)
        self._before = threading.excepthook
        threading.excepthook = lambda args: self.wrong.append(f"{args.thread}: {args.exc_value!r}")
        return self

    def __exit__(self, *_: object) -> None:
        threading.excepthook = self._before
        logging.getLogger().removeHandler(self)


class Fuzzer:
    """Attacks one server in rounds, and checks it after each."""

    def __init__(self, target: Target, heard: Heard) -> None:
        self.target, self._heard = target, heard
        heard.secrets.append(target.token)
        target.release()
        self._expected = target.check()
        self.statuses: Counter[int] = Counter()

    def round(self, rng: random.Random, at_once: int = AT_ONCE) -> None:
        """Up to ``at_once`` requests together, in some rounds all of a stranger. Raises AssertionError."""
        episode = self.target.prepare(rng)
        strangers = rng.random() < 0.3
        attacks = [self._attack(rng, episode, strangers) for _ in range(rng.randint(1, at_once))]
        before = self.target.state()
        answers = send(attacks, self.target.port, (lambda: None) if strangers else self.target.release)
        for sent, answer in answers:
            self.statuses[judge(sent, answer, [self.target.token])] += 1
        if strangers:
            after = self.target.state()
            assert after == before, f"strangers changed {before} to {after}: {_list(attacks)}"
            self.target.release()
        found = self.target.check()
        assert found == self._expected, f"{found} instead of {self._expected} after {_list(attacks)}"
        assert not self.target.crashed, f"{self.target.crashed} after {_list(attacks)}"
        wrong, self._heard.wrong = self._heard.wrong, []
        assert not wrong, f"the log has {wrong[0]} after {_list(attacks)}"

    def _attack(self, rng: random.Random, episode: str, stranger: bool) -> Attack:
        while True:
            route = rng.choice(self.target.routes)
            made = attack(rng, route, episode, self.target.token, self.target.port, MIN_VERSION_HEADER)
            if not (stranger and made.authorised):
                return made


def _list(attacks: Sequence[Attack]) -> str:
    return "\n".join(map(shown, attacks))


def tokenizer() -> PreTrainedTokenizerFast:
    """A tiny one with a chat template."""
    said = [{"role": "user", "content": "what is 2+3?"}, {"role": "assistant", "content": '5 {"x": [1, 2]} hm'}]
    return train_tokenizer([said] * 30, 100)


class Memory:
    """How far this process grows after a first quarter of the samples."""

    def __init__(self) -> None:
        self._process, self._resident = psutil.Process(), list[int]()

    def sample(self) -> None:
        """Note the resident memory."""
        self._resident.append(self._process.memory_info().rss)

    @property
    def warm(self) -> int:
        """Bytes after the first quarter."""
        return self._resident[len(self._resident) // 4]

    @property
    def grown(self) -> int:
        """Most bytes beyond that."""
        return max(self._resident) - self.warm


def attack_all(fuzzers: Sequence[Fuzzer], requests: int, seed: int, memory: Memory) -> None:
    """Rounds at each server in turn, until there were enough requests."""
    for number in itertools.count():
        for fuzzer in fuzzers:
            try:
                fuzzer.round(random.Random(f"{seed}.{number}"))
            except AssertionError:
                print(f"{fuzzer.target.name}, seed {seed}, round {number}:", file=sys.stderr)
                raise
        if number % 20 == 0:
            memory.sample()
            print(f"{total(fuzzers)} requests", file=sys.stderr, flush=True)
        if total(fuzzers) >= requests:
            return


def total(fuzzers: Sequence[Fuzzer]) -> int:
    """The number of requests so far."""
    return sum(sum(fuzzer.statuses.values()) for fuzzer in fuzzers)


def main() -> int:
    """Attack the servers; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.http", description=__doc__)
    parser.add_argument("--requests", type=int, default=5000, metavar="N", help="in all (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--server", default="", help="only the one whose name begins so")
    arguments = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # what matters is heard, not printed
    torch.set_num_threads(1)
    began, memory = time.monotonic(), Memory()
    with (
        tempfile.TemporaryDirectory() as folder,
        Heard() as heard,
        targets(make_model(Path(folder)), tokenizer()) as found,
    ):
        fuzzers = [Fuzzer(target, heard) for target in found if target.name.startswith(arguments.server)]
        attack_all(fuzzers, arguments.requests, arguments.seed, memory)
    for fuzzer in fuzzers:
        statuses = dict(sorted(fuzzer.statuses.items()))
        print(f"{fuzzer.target.name}: {sum(statuses.values())} requests, by status (0: cut off) {statuses}")
    print(
        f"{total(fuzzers)} requests in {time.monotonic() - began:.0f} s, every server sound; memory grew by "
        f"{memory.grown / 1e6:.1f} MB from {memory.warm / 1e6:.0f} MB"
    )
    return int(memory.grown > GROWTH_BYTES)


if __name__ == "__main__":
    sys.exit(main())
