"""Access to the queue's sockets: roles, key files (Curve25519, as in libzmq), sockets, and authentication.

    FOLDER/server.pub, server.key            the queue's pair; clients know the queue by the first
    FOLDER/clients/NAME.pub                  a client that may connect until the file is deleted: its key and its role
    FOLDER/NAME.key                          that client's secret; a run's own processes use the names of their roles

Keys have 40 characters (Z85). Files are made 0600, and folders that are made 0700. Over TCP, libzmq asks the server
on its own thread before a client may send (ZAP, RFC 27). A socket file lies in a folder that only this user can
enter: the operating system keeps strangers out, so nothing is encrypted, and a client shows its key in its hello.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
from zmq.utils import z85

from rl_async.configs.derived import key_folder
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.suggestions import nearest
from rl_async.errors import UserError
from rl_async.process.http_auth import ROLES, Role

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


SERVER = "server"


class ClientKeys(msgspec.Struct, frozen=True):
    """The keys of a client: the queue's public key and its own pair."""

    server: bytes
    public: bytes
    secret: bytes

    # A secret must not get into a log.
    def __repr__(self) -> str:
        return f"ClientKeys(public={self.public!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("public", self.public)]


class ServerKeys(msgspec.Struct, frozen=True):
    """The queue's secret, and the keys that may connect."""

    secret: bytes
    allowed: AllowList

    def __repr__(self) -> str:
        return "ServerKeys()"


def make_keys(folder: Path) -> list[Path]:
    """Make the missing pairs of the queue and of a run's own processes; return the secret files made.

    Raises UserError if they cannot be written, or if half of a pair exists.
    """
    server = (folder / f"{SERVER}.key", folder / f"{SERVER}.pub", "")
    return _make(folder, [server, *(_pair(folder, role, role) for role in ROLES)])


def make_client_keys(folder: Path, client: str, role: Role) -> list[Path]:
    """Make the pair of another client as well; raises UserError as ``make_keys`` does."""
    if not client.replace("-", "").replace("_", "").isalnum() or client in (SERVER, *ROLES):
        raise UserError(
            f"--client: {client!r} cannot name a key file; use letters, digits, '-' and '_', and no role's name"
        )
    return make_keys(folder) + _make(folder, [_pair(folder, client, role)])


def _pair(folder: Path, client: str, role: Role) -> tuple[Path, Path, str]:
    return folder / f"{client}.key", folder / "clients" / f"{client}.pub", f" {role}"


def _make(folder: Path, pairs: list[tuple[Path, Path, str]]) -> list[Path]:
    try:
        for place in (folder, folder / "clients"):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [secret for secret, public, role in pairs if _make_pair(secret, public, role)]
    except OSError as error:
        raise UserError(
            f"cannot write keys into {folder}: {error.strerror}; see that there is room and that it can be written"
        ) from error


def _make_pair(secret: Path, public: Path, role: str) -> bool:
    if secret.exists() and public.exists():
        return False
    if secret.exists() or public.exists():
        here, missing = (secret, public) if secret.exists() else (public, secret)
        raise UserError(f"{here} is there and {missing} is not; a client that was shut out stays so: take another name")
    public_key, secret_key = zmq.curve_keypair()
    _write(secret, secret_key)
    _write(public, public_key + role.encode())
    return True


def _write(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(line + b"\n")


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing: this queue needs keys; make them with `rl-async queue keygen {path.parent}`"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read the key file {path}: {error.strerror}") from error
    if len(key) != 40:
        raise UserError(f"{path} does not hold a key of 40 characters; make keys with `rl-async queue keygen`")
    return key


def server_keys(config: RunConfig, run: Path) -> ServerKeys:
    """The queue's keys. Raises UserError naming a missing or invalid file."""
    folder = key_folder(config, run)
    return ServerKeys(_read(folder / f"{SERVER}.key"), AllowList(folder / "clients"))


def client_keys(config: RunConfig, run: Path, role: Role) -> ClientKeys:
    """The keys of the run's own processes in this role. Raises UserError as ``server_keys`` does."""
    return read_client_keys(key_folder(config, run), role)


def read_client_keys(folder: Path, client: str) -> ClientKeys:
    """The keys of a client, from their folder. Raises UserError naming a missing or invalid file."""
    secret = _read(folder / f"{client}.key")
    return ClientKeys(_read(folder / f"{SERVER}.pub"), public_of(secret, str(folder / f"{client}.key")), secret)


def public_of(secret: bytes, place: str) -> bytes:
    """The public key that belongs to a secret one. Raises UserError naming ``place`` if it is invalid."""
    try:
        public: bytes = zmq.curve_public(secret)
    except (zmq.ZMQError, ValueError) as error:
        raise UserError(f"{place} does not hold a secret key") from error
    return public


def provide_keys(config: RunConfig, run: Path) -> None:
    """Make the keys of a run that is about to start. Raises UserError if given ones are missing."""
    if not config.queue.keys:
        make_keys(run / "keys")
    server_keys(config, run)
    for role in ROLES:
        client_keys(config, run, role)


SCHEME = "ipc://"


def is_file(address: str) -> bool:
    """Whether an address is that of a socket file."""
    return address.startswith(SCHEME)


def folder_of(address: str) -> Path:
    """The folder of a socket file's address."""
    return Path(address.removeprefix(SCHEME)).parent


_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"transfer-queue"


class Authenticator:
    """Answers libzmq's questions from the allow-list, and calls ``deny`` for each refused client.

    Make it before the ROUTER binds, and close it after that.
    """

    def __init__(self, context: "zmq.Context[Any]", allowed: AllowList, deny: Callable[[], None]) -> None:
        self._allowed, self._deny = allowed, deny
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close(0)

    def answer(self) -> None:
        """Answer all pending questions."""
        while self.socket.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
            self._allowed.refresh()
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            if key in self._allowed.roles:
                reply = [b"200", b"OK", key, b""]
            else:
                self._deny()
                reply = [b"400", b"this key is not allowed", b"", b""]
            self.socket.send_multipart([version, request, *reply])


def lock(socket: Any, keys: ServerKeys) -> None:
    """Make a ROUTER refuse every client that no ``Authenticator`` lets in, before it binds."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.zap_domain = _DOMAIN
    # Without an authenticator, every client is refused.
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
