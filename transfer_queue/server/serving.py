"""What handlers of verbs get: the queue that they work on, and one request."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from rl_async import messages as m
from rl_async.messages.codec import Frame
from rl_async.transfer_queue.journal.interface import Journal
from rl_async.transfer_queue.server.announcing import Announcing
from rl_async.transfer_queue.server.leasing import Leasing
from rl_async.transfer_queue.state import observe
from rl_async.transfer_queue.state.store import Store

Q = TypeVar("Q", bound=m.Request[Any])


class Serving(NamedTuple):
    """What the handlers of verbs work on."""

    store: Store
    journal: Journal
    leasing: Leasing
    announcing: Announcing
    rates: observe.Rates
    clock: Callable[[], float]


class Incoming(NamedTuple, Generic[Q]):
    """One request, whose connection is ``identity``, and its payload frames."""

    identity: bytes
    request_id: bytes
    request: Q
    payload: Sequence[Frame] = ()
