"""rl-async: asynchronous reinforcement learning for language models. Start reading at docs/architecture.md."""

__version__ = "0.1.0"
