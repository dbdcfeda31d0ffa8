"""CURVE key files (Curve25519, as in libzmq): the identity of the queue, and the clients that may connect.

    FOLDER/server.pub, server.key            the queue's; clients know it by the first
    FOLDER/clients/NAME.pub                  a client that may connect until the file is deleted
    FOLDER/NAME.key                          that client's secret; NAME is ``run`` for a run's own processes

A file holds one key of 40 characters (Z85). Files are made 0600, and folders that are made 0700.
"""

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rl_async.configs.derived.queue import is_closed, key_folder
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError

log = logging.getLogger("rl_async.queue")

SERVER = "server"
_STAMP_NS = 2_000_000_000  # coarsest time stamp of a file system
CLIENT = "run"


class ClientKeys(msgspec.Struct, frozen=True):
    """What a client needs: the queue's public key and its own pair."""

    server: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"ClientKeys(public={self.public!r})"  # a secret belongs in no log

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("public", self.public)]


class AllowList:
    """The public keys that may connect: some that are fixed, and those in a folder, which may change meanwhile."""

    def __init__(self, folder: Path, fixed: Iterable[str] = ()) -> None:
        self._folder, self._fixed = folder, frozenset(key.encode() for key in fixed)
        self._changed_ns = -1
        self._warned: set[str] = set()
        self.keys = self._fixed
        self.refresh()
        if self._warned:  # when the queue starts it is a mistake; later, perhaps a file that is just being copied
            raise UserError(min(self._warned))

    def refresh(self) -> None:
        """Read the folder again if it has changed.

        A file without a key, such as one that is still being copied, is ignored and read again later.
        """
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except OSError:  # missing or unreadable: nobody else may connect until it is back
            self.keys, self._changed_ns = self._fixed, -1
            return
        if changed_ns == self._changed_ns:
            return
        # A folder that changed just now may change again under the same time stamp: then it is read again.
        self._changed_ns = changed_ns if time.time_ns() - changed_ns > _STAMP_NS else -1
        keys: set[bytes] = set()
        for file in self._folder.glob("*.pub"):
            try:
                key = _read_if_there(file)
            except UserError as error:
                if str(error) not in self._warned:
                    log.warning("%s", error)
                    self._warned.add(str(error))
                self._changed_ns = -1
                continue
            if key is not None:
                keys.add(key)
        self.keys = self._fixed | keys


class ServerKeys(msgspec.Struct, frozen=True):
    """What the queue needs: its secret, and the keys that may connect."""

    secret: bytes
    allowed: AllowList

    def __repr__(self) -> str:
        return "ServerKeys()"


def make_keys(folder: Path, client: str = CLIENT) -> list[Path]:
    """Make what is missing of the queue's pair and of ``client``'s; the secret files made.

    Raises UserError if they cannot be written, or if half a pair is there.
    """
    if not client.replace("-", "").replace("_", "").isalnum() or client == SERVER:
        raise UserError(f"--client: {client!r} is no name for a key file; use letters, digits, '-' and '_'")
    try:
        for place in (folder, folder / "clients"):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        pairs = (
            (folder / f"{SERVER}.key", folder / f"{SERVER}.pub"),
            (folder / f"{client}.key", folder / "clients" / f"{client}.pub"),
        )
        return [secret for secret, public in pairs if _make_pair(secret, public)]
    except OSError as error:
        raise UserError(f"cannot write keys into {folder}: {error.strerror}") from error


def _make_pair(secret: Path, public: Path) -> bool:
    if secret.exists() and public.exists():
        return False
    if secret.exists() or public.exists():
        here, missing = (secret, public) if secret.exists() else (public, secret)
        raise UserError(f"{here} is there and {missing} is not; a client that was shut out stays so: take another name")
    public_key, secret_key = zmq.curve_keypair()
    _write(secret, secret_key)
    _write(public, public_key)
    return True


def _write(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(key + b"\n")


def _read_if_there(path: Path) -> bytes | None:
    try:
        key = path.read_bytes().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the key file {path}: {error.strerror}") from error
    if len(key) != 40:
        raise UserError(f"{path} does not hold a key of 40 characters; make keys with `rl-async queue keygen`")
    return key


def _read(path: Path) -> bytes:
    key = _read_if_there(path)
    if key is None:
        raise UserError(
            f"{path} is missing: this queue needs keys; make them with `rl-async queue keygen {path.parent}`"
        )
    return key


def server_keys(config: RunConfig, run: Path) -> ServerKeys | None:
    """The queue's, None if it is open. Raises UserError naming a file that is missing or unfit."""
    folder = key_folder(config, run)
    if folder is None:
        return None
    return ServerKeys(_read(folder / f"{SERVER}.key"), AllowList(folder / "clients", config.queue.clients))


def client_keys(config: RunConfig, run: Path) -> ClientKeys | None:
    """Those of the run's own processes, None if its queue is open. Raises UserError as ``server_keys``."""
    folder = key_folder(config, run)
    return None if folder is None else read_client_keys(folder)


def read_client_keys(folder: Path, client: str = CLIENT) -> ClientKeys:
    """A client's, from the folder that has them. Raises UserError naming a file that is missing or unfit."""
    secret = _read(folder / f"{client}.key")
    try:
        public = zmq.curve_public(secret)
    except zmq.ZMQError as error:
        raise UserError(f"{folder / f'{client}.key'} does not hold a secret key") from error
    return ClientKeys(_read(folder / f"{SERVER}.pub"), public, secret)


def provide_keys(config: RunConfig, run: Path) -> None:
    """Before a run starts: make its own keys if it needs some. Raises UserError if those it was given are missing."""
    if is_closed(config.queue) and not config.queue.keys:
        make_keys(run / "keys")
    server_keys(config, run)
    client_keys(config, run)


def use_keys(socket: "zmq.Socket[Any]", keys: ClientKeys | None) -> None:
    """Make a client's socket speak CURVE, before it connects."""
    if keys is not None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys.server, keys.public, keys.secret
