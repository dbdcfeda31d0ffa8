"""Addresses of a running run, for programs that join it: ``RUN/endpoints.json``."""

from pathlib import Path

import msgspec

from rl_async.errors import UserError
from rl_async.files import replace_file
from rl_async.undecodable import UNDECODABLE

FILE = "endpoints.json"


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a run; empty for what the run does not have."""

    queue: str
    reward_model: str = ""
    gateway: str = ""


def write_endpoints(run: Path, endpoints: Endpoints) -> None:
    """Write the addresses, in place of those of an earlier start."""
    replace_file(run / FILE, msgspec.json.encode(endpoints) + b"\n")


def gateway_url(run: Path) -> str:
    """Return the URL of the run's own gateway. Raises UserError if it has none."""
    url = read_endpoints(run).gateway
    if not url:
        raise UserError(f"{run} has no gateway of its own (agent.gateway); name the one that you added with --url")
    return url


def read_endpoints(run: Path) -> Endpoints:
    """Read the addresses of the last start. Raises UserError if the run was never started."""
    try:
        return msgspec.json.decode((run / FILE).read_bytes(), type=Endpoints)
    except (OSError, *UNDECODABLE) as error:
        raise UserError(f"{run} is not the folder of a running run: {error}") from error
