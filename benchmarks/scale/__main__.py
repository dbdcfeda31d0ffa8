"""What grows how, from 100 workers with 10 engines to 10,000 with 1,000?

    python -m benchmarks.scale [--workers 100 1000 10000] [--only queue|pools] [--json FILE]

Real: the queue's server, the pools of engines with their HTTP clients, and every message. Simulated: the workers, which
hand rows over without having played anything, and the engines, which answer without a model. All are processes of this
machine and share its cores, so rates are not the system's; processor times are.

The queue, with its processor time:

us/group     from the lease of a group of 8 rows to its retirement, polls and renewals of all workers included
idle us      per worker and second, while nobody has anything to do
KB each      memory of one connected worker
register ms  for one engine to ten workers to be registered while all workers follow the registry
publish ms   for a version of all engines to be published, and for all workers to have heard; and seconds of it
lost s       from the death of a tenth of the workers until all that they held waits again (the lease is 15 s)
stalled s    the longest that another client waited for an answer in that time

The pools, each of which has all engines and up to 1,000 conversations:

us/request   processor time of one answered request, HTTP client included
idle share   of a processor, for one pool without requests: probes
KB/engine    memory of one pool, by engine
dead s       from the death of a twentieth of the engines until every pool has given all of them up
hung s       the same of engines that stop answering
"""

import argparse
import json
from pathlib import Path
from typing import Any

import psutil

from benchmarks.scale import fleet, pools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--only", choices=["queue", "pools"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    print(f"{psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}")
    found: dict[str, list[Any]] = {}
    for name, part in {"queue": fleet, "pools": pools}.items():
        if arguments.only not in (None, name):
            continue
        print(part.HEAD)
        found[name] = []
        for count in arguments.workers:
            row = part.measure(count, max(1, count // 10))
            found[name].append(row._asdict())
            print(row, flush=True)
            if arguments.json:  # after each, so that an interrupted run leaves what it has found
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
