"""Where groups listen: on the interface of an address, unless the user chose one."""

import logging
import os
from collections.abc import Iterator

import psutil
import pytest

from rl_async.accelerators import accelerator_here
from rl_async.weight_sync.transports.process_groups import bind_groups, interface_of, own_address

NAMES = ("GLOO_SOCKET_IFNAME", accelerator_here().interface)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # restored at the end, whatever the test sets
        del os.environ[name]
    yield


def loopback() -> str:
    return next(name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found))


def test_groups_listen_on_the_interface_by_which_a_rank_reaches_its_master() -> None:
    bind_groups(own_address("127.0.0.1", 1))
    assert [os.environ[name] for name in NAMES] == [loopback(), f"={loopback()}"]


def test_a_rank_alone_leaves_groups_of_devices_free_for_the_weights() -> None:
    bind_groups("127.0.0.1", devices=False)
    assert [name in os.environ for name in NAMES] == [True, False]


def test_a_users_own_choice_stays() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    bind_groups("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_an_address_of_no_interface_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert interface_of("203.0.113.1") is None
    with caplog.at_level(logging.WARNING):
        bind_groups("203.0.113.1")
    assert "203.0.113.1" in caplog.text and not set(NAMES) & set(os.environ)
