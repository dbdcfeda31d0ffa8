"""The client for agent programs under its long name; ``rl_async.gateway`` has it, which needs no other package."""

from rl_async.gateway import FINISHED, Gateway, GatewayError, RemoteEpisode

__all__ = ["FINISHED", "Gateway", "GatewayError", "RemoteEpisode"]
