"""What a client's key allows: the role that stands beside it in the list of clients."""

from typing import Literal, get_args

Role = Literal["worker", "trainer", "operator", "reader", "shard"]

ROLES: tuple[Role, ...] = get_args(Role)
EVERYBODY: frozenset[Role] = frozenset(ROLES)


def only(*roles: Role) -> frozenset[Role]:
    """The roles that may use a verb."""
    return frozenset(roles)
