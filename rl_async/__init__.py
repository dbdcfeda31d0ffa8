"""Asynchronous reinforcement learning for language models. Start reading at docs/explanation/architecture.md."""

__version__ = "0.1.0"
