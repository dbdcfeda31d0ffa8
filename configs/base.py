"""The base class of config structs, and the types and descriptions that their fields share."""

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
