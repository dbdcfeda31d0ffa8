"""Two hosts of a cluster: network namespaces of this machine, which share its file system."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two network namespaces with a cable between them: their addresses by name."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = secrets.token_hex(3)
    found = {f"rl{tag}a": "10.77.0.1", f"rl{tag}b": "10.77.0.2"}
    first, second = found

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)

    try:
        ip("netns", "add", first)
        ip("netns", "add", second)
        ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in found.items():
            for arguments in (
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", name, *arguments)
    except subprocess.CalledProcessError as error:
        for name in found:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield found
    for name in found:
        ip("netns", "del", name)
