"""How weights travel, as the config says: ``weight_sync`` without the sizes of buckets."""

from dataclasses import dataclass
from pathlib import Path

from rl_async.weight_sync.protocol import Hold


@dataclass(frozen=True)
class SyncOptions:
    """``folder`` is where the transport ``disk`` puts its files, each group of engines in a folder of its own."""

    folder: Path = Path("weights")
    delta: bool = False
    staged: bool = False
    waves: int = 1  # engines are updated in so many groups, one after another
    sync_timeout_s: float = 600.0  # of one whole update of all engines
    host: str = "127.0.0.1"  # of the sender, where the engines meet it

    @property
    def hold(self) -> Hold:
        """What engines do with the buckets that they receive."""
        return "stage" if self.staged else "keep" if self.delta else "no"


PLAIN = SyncOptions()
