"""The gateway section: the door through which agent programs play episodes."""

from typing import Annotated

from rl_async.configs.schema.base import Config, Count, Positive, doc


class GatewayConfig(Config, frozen=True):
    host: Annotated[
        str, doc("Address to listen on. Whoever reaches it can lease episodes; nothing but loopback is safe by itself.")
    ] = "127.0.0.1"
    port: Annotated[Count, doc("0: a free port.")] = 0
    max_answers: Annotated[Positive, doc("Answers per episode; further requests are refused.")] = 64
