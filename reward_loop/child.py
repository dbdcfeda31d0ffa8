"""The process behind one place of the pool: reads conversations from stdin, writes scores to stdout.

Frames are msgpack behind a four-byte length. It ends when stdin closes.
"""

import math
import os
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from rl_async.reward_loop.api import Conversation, to_score
from rl_async.reward_loop.scorers.registry import describe, get_scorer

LENGTH = struct.Struct(">I")
GRACE_S = 5.0  # past the deadline, when nobody came to kill this process


class Ask(msgspec.Struct):
    """Score this. Pool -> child."""

    scorer: str
    conversation: Conversation
    timeout_s: float


class Answer(msgspec.Struct):
    """The score, or in ``error`` why there is none. Child -> pool; an empty one first, when it is ready."""

    value: float = 0.0
    extra: dict[str, float] = {}
    error: str = ""


def serve(requests: BinaryIO, answers: BinaryIO, names: list[str]) -> None:
    """Load the scorers, say so, then answer until ``requests`` ends.

    Consumes Asks; produces an Answer for each; waits for the next Ask, unblocked by the end of the stream.
    """
    functions = {name: get_scorer(name).function for name in names}
    decoder = msgspec.msgpack.Decoder(Ask)
    _write(answers, Answer())
    while head := requests.read(LENGTH.size):
        ask = decoder.decode(requests.read(*LENGTH.unpack(head)))
        # The pool kills a process that is late. Should the pool be dead itself, the kernel does it.
        signal.alarm(math.ceil(ask.timeout_s + GRACE_S))
        try:
            score = to_score(functions[ask.scorer](ask.conversation))
            answer = Answer(score.value, score.extra)
        except Exception as error:  # the user's code may raise anything; it is told, and belongs to this conversation
            answer = Answer(error=describe(error))
        signal.alarm(0)
        _write(answers, answer)


def _write(stream: BinaryIO, answer: Answer) -> None:
    body = msgspec.msgpack.encode(answer)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def main() -> None:
    """Entry point: the names of the scorers are the arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes stdin
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a scorer prints goes to the log
    serve(sys.stdin.buffer, answers, sys.argv[1:])


if __name__ == "__main__":
    main()
