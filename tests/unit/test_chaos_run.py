"""Which faults a chaos run gets."""

import random
import socket
import threading
from collections import Counter

import pytest

from tests.chaos.host.proxy import Proxy
from tests.chaos.host.whole_run import KINDS, NAMES, Fault, Kind
from tests.chaos.run import NO_NAMESPACES, RUN_KINDS, all_faults


def test_every_kind_strikes_every_role_equally_often() -> None:
    struck = Counter(all_faults(len(KINDS) * 16, list(KINDS), random.Random(0)))
    for kind, roles in KINDS.items():
        assert {struck[Fault(role, kind)] for role in roles} == {16 // len(roles)}


@pytest.mark.parametrize("kinds", [list(KINDS), list(NO_NAMESPACES)])
def test_a_few_faults_have_all_kinds_and_roles(kinds: list[str]) -> None:
    faults = all_faults(6 * len(kinds), kinds, random.Random(0))
    assert {fault.kind for fault in faults} == set(kinds)
    assert {fault.role for fault in faults} >= set(NAMES)


def test_the_first_two_kinds_of_runs_allow_every_fault() -> None:
    faults = all_faults(200, list(KINDS), random.Random(0))
    assert all(any(kind.allows(fault) for kind in RUN_KINDS[:2]) for fault in faults)
    assert not Kind(gateway=True, network=False).allows(Fault("queue", "loss"))
    assert not Kind(gateway=True, network=False, disks=False).allows(Fault("run folder", "full"))
    assert not Kind(gateway=True, network=True).allows(Fault("worker", "kill"))


def test_a_proxy_holds_and_cuts_what_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy("127.0.0.1", server.getsockname)
        with socket.create_connection(("127.0.0.1", proxy.port), 30) as near:
            far, _ = server.accept()
            with far:
                near.sendall(b"a")
                assert far.recv(1) == b"a"
                far.settimeout(0.2)
                held = threading.Thread(target=proxy.strike, args=("hold", 1.0, random.Random(0)))
                held.start()
                near.sendall(b"b")
                with pytest.raises(TimeoutError):
                    far.recv(1)
                held.join()
                far.settimeout(30)
                assert far.recv(1) == b"b"
                proxy.cut()
                assert near.recv(1) == far.recv(1) == b""
        proxy.close()
