"""What one client may ask of the transfer queue, so that no client harms another."""

from typing import Annotated

from msgspec import Meta

from rl_async.configs.schema.base import Config, Positive, doc


class QueueLimits(Config, frozen=True):
    # The lower bounds are what the clients' own messages need (transfer_queue/client/outbox.py).
    frame_bytes: Annotated[
        int, Meta(ge=1 << 22, description="Largest frame; the connection that sends a larger one is closed.")
    ] = 1 << 28
    message_bytes: Annotated[
        int, Meta(ge=1 << 23, description="Largest message, all frames together; a larger one is refused.")
    ] = 1 << 29
    frames: Annotated[
        int, Meta(ge=1026, description="Most frames of a message; each row that is put is one of them.")
    ] = 4096
    clients: Annotated[Positive, doc("Most connections; more wait until one is silent for two minutes.")] = 4096
    requests_per_s: Annotated[
        float, Meta(gt=0, description="Per connection, after a burst of one second's worth; more are told to wait.")
    ] = 5000.0
