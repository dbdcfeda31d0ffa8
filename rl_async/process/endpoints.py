"""Where a run's processes answer, for those who join it while it goes on: ``RUN/endpoints.json``."""

from pathlib import Path

import msgspec

from rl_async.errors import UserError
from rl_async.files import replace_file

FILE = "endpoints.json"


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses; an empty one belongs to what the run does not have."""

    queue: str
    reward_model: str = ""
    gateway: str = ""


def write_endpoints(run: Path, endpoints: Endpoints) -> None:
    """Tell others where the run is, in one step."""
    replace_file(run / FILE, msgspec.json.encode(endpoints) + b"\n")


def read_endpoints(run: Path) -> Endpoints:
    """Where the run was when it was started last. Raises UserError if it never was."""
    try:
        return msgspec.json.decode((run / FILE).read_bytes(), type=Endpoints)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{run} is not the folder of a run that is going on: {error}") from error
