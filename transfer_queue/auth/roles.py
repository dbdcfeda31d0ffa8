"""Roles, and the public keys that may connect with theirs: files in a folder, and lines of the config."""

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

from rl_async.configs.suggestions import nearest
from rl_async.errors import UserError

Role = Literal["worker", "trainer", "operator", "reader", "shard"]

ROLES: tuple[Role, ...] = get_args(Role)
EVERYBODY: frozenset[Role] = frozenset(ROLES)


log = logging.getLogger("rl_async.queue")

KEYGEN = "`rl-async queue keygen`"
# The coarsest time stamp of a file system.
_STAMP_NS = 2_000_000_000


class AllowList:
    """The roles of the public keys that may connect: fixed ones, and those in a folder, which may change."""

    def __init__(self, folder: Path, fixed: Iterable[str] = ()) -> None:
        self._folder = folder
        self._fixed = dict(parse_client(line, "a fixed key") for line in fixed)
        self._changed_ns = -1
        self._warned: set[str] = set()
        self.roles: Mapping[bytes, Role] = self._fixed
        self.refresh()
        # Later, an invalid file may just be being copied.
        if self._warned:
            raise UserError(min(self._warned))

    def refresh(self) -> None:
        """Read the folder again if it has changed.

        A file without a key, such as one that is still being copied, is ignored and read again later.
        """
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        # While the folder is missing or unreadable, only fixed keys may connect.
        except OSError:
            self.roles, self._changed_ns = self._fixed, -1
            return
        if changed_ns == self._changed_ns:
            return
        # A folder that changed just now may change again under the same time stamp: then it is read again.
        self._changed_ns = changed_ns if time.time_ns() - changed_ns > _STAMP_NS else -1
        roles: dict[bytes, Role] = {}
        for file in self._folder.glob("*.pub"):
            try:
                found = _read_client(file)
            except UserError as error:
                if str(error) not in self._warned:
                    log.warning("%s", error)
                    self._warned.add(str(error))
                self._changed_ns = -1
                continue
            if found is not None:
                roles[found[0]] = found[1]
        self.roles = self._fixed | roles


def parse_client(line: str, place: str) -> tuple[bytes, Role]:
    """The public key and the role in ``KEY ROLE``. Raises UserError naming ``place`` for another line."""
    key, _, name = line.strip().partition(" ")
    if len(key) != 40 or not key.isascii():
        raise UserError(f"{place} does not hold a public key of 40 characters and a role; make it with {KEYGEN}")
    for role in ROLES:
        if name == role:
            return key.encode(), role
    raise UserError(f"{place} has no role{nearest(name, ROLES)} behind its key; write one of {', '.join(ROLES)}")


def _read_client(file: Path) -> tuple[bytes, Role] | None:
    """The key and role of a client's file; None if it is gone."""
    try:
        line = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the key file {file}: {error.strerror}") from error
    return parse_client(line.decode(errors="replace"), str(file))
