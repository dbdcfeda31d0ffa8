"""Network namespaces, one for each process of a run, on a bridge; packets to and from any of them can be lost.

The launcher is where the bridge is. Rules of nftables drop packets, so that kernels without netem will do.
"""

import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

BRIDGE, HUB = "10.77.0.1", "launcher"
TABLE = (
    "table inet chaos { chain arriving { type filter hook input priority 0; }; "
    "chain leaving { type filter hook output priority 0; }; }"
)
RULES = (("arriving", "iifname"), ("leaving", "oifname"))


class Network:
    """A namespace with an address for every name, and the launcher's, which is the caller's own."""

    def __init__(self, names: Iterable[str]) -> None:
        self.addresses = {HUB: BRIDGE}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        for words in ("add br0 type bridge", "set br0 up"):
            _run("ip", "link", *words.split())
        _run("ip", "addr", "add", f"{BRIDGE}/24", "dev", "br0")
        _run("nft", TABLE)
        for number, name in enumerate(names, start=2):
            self._add(name, number)

    def _add(self, name: str, number: int) -> None:
        holder = self._holders[name] = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
            time.sleep(0.005)
        address = self.addresses[name] = f"10.77.0.{number}"
        peer = f"veth{number}"
        _run("ip", "link", "add", peer, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _run("ip", "link", "set", peer, "master", "br0", "up")
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run(*self.enter(name), "ip", *words.split())
        _run(*self.enter(name), "nft", TABLE)

    def enter(self, name: str) -> tuple[str, ...]:
        """Return the words before a command that runs it in the namespace of that name."""
        return () if name == HUB else ("nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "--")

    def lose(self, name: str, percent: int, seconds: float) -> None:
        """Drop that share of what arrives in and leaves a namespace, for that long; 100: all of it."""
        share = f"numgen random mod 100 < {percent} " if percent < 100 else ""
        for chain, interface in RULES:
            _run(*self.enter(name), "nft", f'add rule inet chaos {chain} {interface} != "lo" {share}drop')
        time.sleep(seconds)
        _run(*self.enter(name), "nft", "flush table inet chaos")

    def close(self) -> None:
        """End the namespaces; processes in them keep theirs until they end."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        _run("ip", "link", "del", "br0")
        _run("nft", "delete table inet chaos")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
