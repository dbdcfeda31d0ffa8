"""Wall clocks that jump while their processes run, and disks that are slow, each process with its own: a shim that is
preloaded, and a file per process, which has the clock's shift and the length of a flush.

Only CLOCK_REALTIME moves, as when NTP or an operator sets a clock. A process that is started again goes on with the
clock of its predecessor.
"""

import random
import struct
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")
JUMPS_S = (2.0, 60.0, 3600.0, 6 * 3600.0)  # forwards or backwards, each up to half as long again


class Clocks:
    """Compiles the shim into ``folder``, where the clocks' files are too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._library = folder, folder / "clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE)], check=True)

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables of a process that lives by the clock ``name``."""
        file = self._folder / name
        if not file.exists():
            file.write_bytes(struct.pack("=qq", 0, 0))
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(file)}

    def slow_disk(self, name: str, flush_s: float, seconds: float) -> None:
        """Have each flush of a process take ``flush_s``, for that long; one that has begun then takes its time."""
        for nanoseconds, pause_s in ((int(flush_s * 1e9), seconds), (0, 0.0)):
            with (self._folder / name).open("r+b", buffering=0) as file:
                file.seek(8)
                file.write(struct.pack("=q", nanoseconds))
            time.sleep(pause_s)

    def jump(self, name: str, rng: random.Random) -> None:
        """Set the clock forwards or backwards, by seconds to hours."""
        by = rng.choice((-1, 1)) * rng.choice(JUMPS_S) * (1 + rng.random() / 2)
        with (self._folder / name).open("r+b", buffering=0) as file:
            (now,) = struct.unpack("=q", file.read(8))
            file.seek(0)
            file.write(struct.pack("=q", now + int(by * 1e9)))
