"""Every message that crosses a process boundary, in the order in which data flows.

``data`` has what the queue is about (tasks, versions, trajectories), ``requests`` and ``replies`` what is sent on the
queue's sockets, and ``codec`` encodes structs with arrays. Each struct names its producer and its consumer. To add a
request: its class in ``requests``, with its replies, and a line in each table of verbs named there. When an older
process would misread a message, raise SCHEMA.

Structs of which there are many are ``gc=False``: Python does not look for reference cycles through them, and they are
to have none. Looking took a fifth of the queue's time and a third of its readers'.
"""

from rl_async.messages.data import *  # noqa: F403
from rl_async.messages.replies import *  # noqa: F403
from rl_async.messages.requests import *  # noqa: F403

SCHEMA = 12
