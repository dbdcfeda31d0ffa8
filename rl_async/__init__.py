"""Asynchronous reinforcement learning for language models. Start reading at docs/explanation/architecture.md."""


def __getattr__(name: str) -> str:
    """Look up ``__version__`` when it is used: pyproject.toml holds it, and the installed metadata repeat it."""
    if name == "__version__":
        from rl_async.installation import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
