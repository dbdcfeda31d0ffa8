import socket

import pytest

from rl_async.errors import ConfigError
from rl_async.launcher.plan.planning import HOST, PortWish, assign_ports


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = assign_ports([PortWish(f"p{i}") for i in range(20)])
    assert len(set(ports.values())) == 20
    for port in ports.values():
        with socket.socket() as listener:
            listener.bind((HOST, port))


def test_a_taken_port_names_its_key(taken_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"queue\.port: port {taken_port} "):
        assign_ports([PortWish("other"), PortWish("queue", taken_port, "queue.port")])


def test_a_port_wished_for_twice_is_refused() -> None:
    free = assign_ports([PortWish("p")])["p"]
    with pytest.raises(ConfigError, match=r"rollout\.port"):
        assign_ports([PortWish("queue", free, "queue.port"), PortWish("engine-0", free, "rollout.port")])


def test_a_number_that_is_no_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"queue\.port: port 70000"):
        assign_ports([PortWish("queue", 70000, "queue.port")])


def test_a_configured_port_is_kept() -> None:
    free = assign_ports([PortWish("p")])["p"]
    assert assign_ports([PortWish("p", free, "k")]) == {"p": free}
