"""Ray's token authentication: a cluster may ask its clients for the token that ``ray get-auth-token`` prints."""

import os
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

_CONNECT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
_CONNECT_S = 60.0


def present_token(environment: MutableMapping[str, str], home: Path, wants_token: Callable[[], bool]) -> bool:
    """Have Ray present this user's token, if there is one and the cluster wants it; returns whether it does.

    Ray 2.60 presents a token to a cluster that it found by itself, but to an address only if RAY_AUTH_MODE says so. A
    cluster that wants none takes a client that presents one, and then cancels its actors: hence ``wants_token``, which
    is asked if there is a token and RAY_AUTH_MODE says nothing. Call this before Ray is imported: Ray reads the
    variable once.
    """
    if "RAY_AUTH_MODE" not in environment:
        named = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
        if named or (home / ".ray" / "auth_token").is_file():
            environment["RAY_AUTH_MODE"] = "token" if wants_token() else "disabled"
    return environment.get("RAY_AUTH_MODE", "").lower() == "token"


def refuses_without_token(address: str) -> bool:
    """Whether the cluster at ``address`` (empty: RAY_ADDRESS, or this machine's) takes no client without a token.

    Also True if none can connect for another reason: with the token Ray then says which. Takes about a second, and
    four if the cluster refuses.
    """
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}  # Ray reads it once in a process, so it takes another one
    command = [sys.executable, "-P", "-c", _CONNECT, address or "auto"]
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=_CONNECT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True
