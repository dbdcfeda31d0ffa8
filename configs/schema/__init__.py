"""Every section of the config as a frozen struct, one file for a section or two; `run.py` puts them together.

The loader makes these structs, and every role reads them. To add a key, add a field with its description here and read
it where it takes effect: `rl-async config explain` and error messages find it by themselves.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


def doc(text: str) -> Meta:
    """Describe a key, for ``rl-async config explain KEY``."""
    return Meta(description=text)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of all sections: frozen, keyword-only, and unknown keys are refused."""
