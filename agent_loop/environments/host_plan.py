"""Decides, for a worker, which host prepares environments, which episode gets one, and when to replace a host. Pure."""

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

# After so many failures of hosts in a row, waiting episodes are told.
MOST_FAILURES = 3
# The pause after the second failure in a row; each further one doubles it up to the longest.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0


class StartHost(NamedTuple):
    """Start a process; report ``host_started`` or ``host_lost``."""

    host: int


class StopHost(NamedTuple):
    """End a process that nobody uses; it is forgotten already."""

    host: int


class Prepare(NamedTuple):
    """Prepare an environment; report ``prepared``, or ``prepare_failed`` and then ``ended``."""

    host: int
    instance: int


class Give(NamedTuple):
    """Let the episode that waits with ``ticket`` have an environment; report ``opened``, ``ending``, ``ended``."""

    ticket: int
    host: int
    instance: int


class Refuse(NamedTuple):
    """Tell the episode that waits with ``ticket`` why it gets none."""

    ticket: int
    reason: str


Action = StartHost | StopHost | Prepare | Give | Refuse


@dataclass
class _Host:
    """A host. ``stuck`` counts environments that were given up with a call that never returned; a host with such a call
    is ``draining``: it gets nothing new."""

    started: bool = False
    draining: bool = False
    stuck: int = 0


@dataclass
class _Instance:
    host: int
    phase: Literal["preparing", "ready", "opening", "open", "ending"]


class HostPlan:
    """The event methods record events; ``decide`` then returns each due action once.

    There are at most ``most`` environments at once, prepared and stuck ones included. At most ``starting`` of them are
    being prepared (or opened, where nothing can be prepared), and ``ready`` are kept prepared. Time comes as ``now``.
    """

    def __init__(self, *, hosts: int, most: int, ready: int, starting: int) -> None:
        self._wanted, self._most, self._starting = hosts, most, starting
        self._ready, self._prepares = ready, False
        self._hosts: dict[int, _Host] = {}
        self._instances: dict[int, _Instance] = {}
        self._tickets: deque[int] = deque()
        self._refused: list[Refuse] = []
        self._host_numbers, self._instance_numbers = itertools.count(), itertools.count()
        # Hosts and preparations that failed in a row.
        self._lost = self._failed = 0
        self._no_host_before = self._no_prefetch_before = 0.0

    def ask(self, ticket: int) -> None:
        """An episode waits for an environment."""
        self._tickets.append(ticket)

    def withdraw(self, ticket: int) -> None:
        """An episode waits no longer; it may have been given one or refused meanwhile."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)

    def host_started(self, host: int, *, prepares: bool) -> None:
        """A host can be used. ``prepares``: whether its environments can be prepared, which is the same for all."""
        self._hosts[host].started, self._prepares = True, prepares

    def host_lost(self, host: int, reason: str, now: float) -> None:
        """A host ended, or never started, and its environments with it."""
        # A stopped host is forgotten already.
        if self._hosts.pop(host, None) is None:
            return
        gone = [number for number, instance in self._instances.items() if instance.host == host]
        phases = [self._instances.pop(number).phase for number in gone]
        for _ in range(phases.count("preparing")):
            self._count_failure(reason, now)
        self._lost += 1
        self._no_host_before = now + _pause(self._lost)
        if self._lost >= MOST_FAILURES:
            self._refused += [Refuse(ticket, reason) for ticket in self._tickets]
            self._tickets.clear()

    def prepared(self, instance: int) -> None:
        """An environment is ready to be given to an episode."""
        if instance in self._instances:
            self._instances[instance].phase = "ready"
            self._lost = self._failed = 0

    def prepare_failed(self, instance: int, reason: str, now: float) -> None:
        """An environment could not be prepared; it is ``ending``."""
        if instance in self._instances:
            self._instances[instance].phase = "ending"
            self._count_failure(reason, now)

    def opened(self, instance: int) -> None:
        """An episode begins in its environment."""
        if instance in self._instances:
            self._instances[instance].phase = "open"
            self._lost = 0

    def ending(self, instance: int) -> None:
        """An environment is being closed."""
        if instance in self._instances:
            self._instances[instance].phase = "ending"

    def ended(self, instance: int, *, stuck: bool = False) -> None:
        """An environment is closed. If ``stuck``, a call in its host never returned, and only the host's end helps."""
        if instance not in self._instances:
            return
        host = self._hosts[self._instances.pop(instance).host]
        if stuck:
            host.stuck += 1
            host.draining = True

    def _count_failure(self, reason: str, now: float) -> None:
        """Let one waiting episode know of a failed preparation, and prepare ahead again after a pause."""
        self._failed += 1
        self._no_prefetch_before = now + _pause(self._failed)
        if self._tickets:
            self._refused.append(Refuse(self._tickets.popleft(), reason))

    def decide(self, now: float) -> list[Action]:
        """Return what to do now."""
        actions: list[Action] = [*self._refused]
        self._refused.clear()
        actions += self._stop_drained()
        if now >= self._no_host_before:
            while sum(not host.draining for host in self._hosts.values()) < self._wanted:
                host = next(self._host_numbers)
                self._hosts[host] = _Host()
                actions.append(StartHost(host))
        actions += self._give()
        if self._prepares:
            actions += self._prepare(now)
        return actions

    def wake_at(self, now: float) -> float | None:
        """Return when ``decide`` may have more to do without an event, or None."""
        waits = []
        if sum(not host.draining for host in self._hosts.values()) < self._wanted:
            waits.append(self._no_host_before)
        if self._missing() > 0:
            waits.append(self._no_prefetch_before)
        return min((at for at in waits if at > now), default=None)

    def _stop_drained(self) -> list[Action]:
        used = {instance.host for instance in self._instances.values()}
        drained = [number for number, host in self._hosts.items() if host.draining and number not in used]
        for number in drained:
            del self._hosts[number]
        return [StopHost(number) for number in drained]

    def _give(self) -> list[Action]:
        """Give prepared environments to those who wait; without preparation, the right to open one."""
        given: list[Action] = []
        while self._tickets:
            if self._prepares:
                ready = [number for number, instance in self._instances.items() if instance.phase == "ready"]
                # Those of a draining host come first, so that it can end.
                number = min(ready, key=lambda n: not self._hosts[self._instances[n].host].draining, default=None)
            else:
                number = self._begin("opening")
            if number is None:
                break
            self._instances[number].phase = "opening"
            given.append(Give(self._tickets.popleft(), self._instances[number].host, number))
        return given

    def _prepare(self, now: float) -> list[Action]:
        """Prepare for those who wait, and ahead of those who will."""
        begun: list[Action] = []
        while self._missing() > 0 and (now >= self._no_prefetch_before or self._unserved() > 0):
            if (number := self._begin("preparing")) is None:
                break
            begun.append(Prepare(self._instances[number].host, number))
        return begun

    def _begin(self, phase: Literal["preparing", "opening"]) -> int | None:
        """Begin an environment in the host with the fewest, or return None if hosts or limits do not allow one."""
        hosts = [number for number, host in self._hosts.items() if host.started and not host.draining]
        alive = len(self._instances) + sum(host.stuck for host in self._hosts.values())
        if not hosts or alive >= self._most or self._count(phase) >= self._starting:
            return None
        loads = {host: sum(instance.host == host for instance in self._instances.values()) for host in hosts}
        number = next(self._instance_numbers)
        self._instances[number] = _Instance(min(hosts, key=loads.__getitem__), phase)
        return number

    def _missing(self) -> int:
        """How many to prepare, besides those that are prepared."""
        return self._unserved() + self._ready - self._count("ready") if self._prepares else 0

    def _unserved(self) -> int:
        """How many episodes wait without a preparation in progress."""
        return len(self._tickets) - self._count("preparing")

    def _count(self, phase: str) -> int:
        return sum(instance.phase == phase for instance in self._instances.values())


def _pause(failures: int) -> float:
    """How long to wait after that many failures in a row: not at all after the first."""
    return 0.0 if failures < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 2, 16))
