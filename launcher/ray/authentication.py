"""Ray's token authentication: a cluster may ask its clients for the token that ``ray get-auth-token`` prints."""

from collections.abc import MutableMapping
from pathlib import Path


def present_token(environment: MutableMapping[str, str], home: Path) -> bool:
    """Have Ray present this user's token, if there is one; returns whether it does.

    Ray 2.60 presents a token to a cluster that it found by itself, but to an address only if RAY_AUTH_MODE says so.
    Call this before Ray is imported: Ray reads the variable once. A cluster that asks for no token ignores one.
    """
    if "RAY_AUTH_MODE" not in environment:
        named = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
        if named or (home / ".ray" / "auth_token").is_file():
            environment["RAY_AUTH_MODE"] = "token"
    return environment.get("RAY_AUTH_MODE", "").lower() == "token"
