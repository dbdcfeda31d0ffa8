"""One scoring process: reads jobs from its standard input, writes answers to what was its standard output.

Frames are a little-endian uint32 length and msgpack. An empty frame says that the process is ready. It ends when its
input is closed, so it does not outlive the worker that started it.
"""

import os
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from rl_async.reward_loop.api import ScorerFailed, to_score
from rl_async.reward_loop.processes import Answer, Job
from rl_async.reward_loop.scorers import call_scorer


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Consumes jobs; produces an answer to each, in order. Waits for the next job; ended by the end of input."""
    decoder = msgspec.msgpack.Decoder(Job)
    _write(target, b"")
    while header := source.read(4):
        (size,) = struct.unpack("<I", header)
        _write(target, msgspec.msgpack.encode(_answer(decoder.decode(source.read(size)))))


def _answer(job: Job) -> Answer:
    try:
        return Answer(score=to_score(call_scorer(job.scorer, job.request)))
    except ScorerFailed as error:
        return Answer(error=str(error))
    # A scorer is the user's code and may raise anything; it marks the trajectory and harms nothing else.
    except Exception as error:
        return Answer(error=f"raised {type(error).__name__}: {error}")


def _write(target: BinaryIO, body: bytes) -> None:
    target.write(struct.pack("<I", len(body)) + body)
    target.flush()


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a scorer prints goes to the log, not among the answers
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
