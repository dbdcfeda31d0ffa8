"""All ranks' outlets as one sender, on rank 0: what ``weight_sync.wave`` and ``fleet`` see of them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rl_async.concurrency import run_in_threads
from rl_async.messages import Version
from rl_async.weight_sync.buckets.buckets import wire_bytes
from rl_async.weight_sync.protocol import Hold, Info, InitInfo, UpdateInfo
from rl_async.weight_sync.ranks.outlet import Outlet
from rl_async.weight_sync.ranks.remote import RankEnd
from rl_async.weight_sync.ranks.rounds import Needs

THREAD = "weight-transfer"


class RankShards:
    """The weights of a version as they lie on the trainer's ranks. ``outlet`` is rank 0's, ``others`` those elsewhere.

    Methods block; they raise WeightSyncError, and RanksLost if a rank is gone.
    """

    def __init__(self, outlet: Outlet, others: Mapping[int, RankEnd]) -> None:
        self._outlet = outlet
        self._ends: dict[int, RankEnd] = {0: outlet, **others}
        self._keys = itertools.count()

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of every tensor, by name."""
        return {name: list(spec.shape) for name, spec in self._outlet.rounds.tensors.items()}

    def begin(self, version: Version, hold: Hold) -> None:
        """Make all ranks send ``version``, which their main threads offer, as this rank's has."""
        offer = self._outlet.offers
        run_in_threads([partial(end.begin, str(version), offer, hold) for end in self._ends.values()], THREAD)

    def seal(self) -> None:
        """Have all ranks copy what no engine has asked for: training may then change the weights."""
        run_in_threads([end.seal for end in self._ends.values()], THREAD)

    def leave(self) -> None:
        """Have all ranks take what they keep for engines off the devices that those share; may be called twice."""
        run_in_threads([end.leave for end in self._ends.values()], THREAD)

    def close(self) -> None:
        """Part from the other ranks, and leave the groups of engines that are still open."""
        for end in self._ends.values():
            end.disconnect()

    def shipment(self, members: int, needs: Sequence[Needs | None]) -> "RankShipment":
        """Prepare to send to ``members`` engines whose workers have these needs (None: everything)."""
        rounds = self._outlet.rounds
        ends = [self._ends[rank] for rank in rounds.senders]
        return RankShipment(f"weights-{next(self._keys)}", ends, members, needs, len(rounds.parts))


class RankShipment:
    """Sends the rounds of a publication to one group of engines, from every rank that holds something.

    A round is one bucket from each rank to each worker. Used as ``wave.Group`` and ``wave.Shipment``.
    """

    def __init__(
        self, key: str, ends: Sequence[RankEnd], members: int, needs: Sequence[Needs | None], count: int
    ) -> None:
        self._key, self._ends = key, ends
        self.needs, self.count = tuple(needs), count
        self.nbytes = 0  # staged since the first round, for one engine
        try:
            self._joins = run_in_threads([partial(end.open, key, members, needs) for end in ends], THREAD)
        except BaseException:
            self.close()
            raise

    def init_info(self, member: int) -> InitInfo:
        """Describe how each worker of an engine joins every rank that sends."""
        backend = self._joins[0][member][0].backend
        of_workers = [
            _one([joins[member][worker] for joins in self._joins], lambda many: InitInfo(backend=backend, sources=many))
            for worker in range(len(self.needs))
        ]
        return _one(of_workers, lambda many: InitInfo(backend=backend, workers=many))

    def connect(self) -> None:
        """Form the groups of all ranks with the workers."""
        run_in_threads([partial(end.connect, self._key) for end in self._ends], THREAD)

    def stage(self, number: int) -> UpdateInfo:
        """Have every rank prepare a round, or start sending it; return the manifest to give to the engines."""
        if number == 0:
            self.nbytes = 0
        infos = run_in_threads([partial(end.stage, self._key, number) for end in self._ends], THREAD)
        self.nbytes += sum(wire_bytes(info) for of_rank in infos for info in of_rank)
        of_workers = [_one(list(of_worker), _of_sources) for of_worker in zip(*infos, strict=True)]
        return _one(of_workers, _of_workers)

    def send(self, number: int) -> None:
        """Transfer a staged round while the engines receive it."""
        run_in_threads([partial(end.send, self._key, number) for end in self._ends], THREAD)

    def unstage(self) -> None:
        """Do nothing: the ranks release a round when the one after the next is staged, and at the end."""

    def leave(self) -> None:
        """Have the ranks that send take what they keep off shared devices; may be called twice."""
        run_in_threads([end.leave for end in self._ends], THREAD)

    def close(self) -> None:
        """Leave the groups; may be called twice."""
        for end in self._ends:
            end.close(self._key)


def _one(infos: list[Info], combine: Callable[[list[Info]], Info]) -> Info:
    """Return the only one as it is, and several combined."""
    return infos[0] if len(infos) == 1 else combine(infos)


def _of_sources(infos: list[UpdateInfo]) -> UpdateInfo:
    return UpdateInfo(names=[], dtype_names=[], shapes=[], checksum="", hold=infos[0].hold, sources=infos)


def _of_workers(infos: list[UpdateInfo]) -> UpdateInfo:
    return UpdateInfo(names=[], dtype_names=[], shapes=[], checksum="", hold=infos[0].hold, workers=infos)
