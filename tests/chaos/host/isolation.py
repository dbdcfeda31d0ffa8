"""Runs this program again in namespaces of its own, where it may mount, make networks and lose packets as any user.

Whatever it mounts and whatever processes it leaves end with it, also when it is killed.
"""

import os
import shutil
import subprocess
import sys
from typing import NoReturn

INSIDE = "CHAOS_ISOLATED"
NEEDED = {"redis-server": "redis-server", "cc": "gcc libc6-dev"}  # command: Debian's packages
FOR_NAMESPACES = {"ip": "iproute2", "nft": "nftables", "unshare": "util-linux", "nsenter": "util-linux"}
UNSHARE = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
REAPING = ["bash", "-c", '"$@"; exit $?', "bash"]  # the first process of a namespace inherits those without a parent
TRIAL = "mount -t tmpfs tmpfs /mnt && ip link add br0 type bridge && nft add table inet chaos"


def install(tools: dict[str, str]) -> str:
    """Return the command that installs what is missing here; empty if nothing is."""
    packages = sorted({package for tool, package in tools.items() if shutil.which(tool) is None})
    return f"apt-get install {' '.join(packages)}" if packages else ""


def why_not_isolated() -> str:
    """Return why this machine offers no namespaces; empty if it does."""
    if missing := install(FOR_NAMESPACES):
        return missing
    tried = subprocess.run([*_unshare(), "sh", "-c", TRIAL], capture_output=True, text=True)
    return f"not permitted here: {tried.stderr.strip()}" if tried.returncode else ""


def run_isolated(module: str, arguments: list[str]) -> NoReturn:
    """Become a process that runs ``module`` in namespaces; all of it ends with this process."""
    command = [*_unshare(), *REAPING, sys.executable, "-m", module, *arguments]
    os.execvpe(command[0], command, os.environ | {INSIDE: "1"})


def is_isolated() -> bool:
    """Whether this is what ``run_isolated`` runs; its loopback is up then."""
    if INSIDE not in os.environ:
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def _unshare() -> list[str]:
    return UNSHARE if os.geteuid() == 0 else [*UNSHARE, "--user", "--map-root-user"]
