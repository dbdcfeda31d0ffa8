"""The embedded engine: a Transformers model with continuous batching, behind vLLM's HTTP dialect.

    process.py -> server.py (HTTP, dialect.py, stream.py) -> engine_thread.py -> core.py
    core.py -> sampler.py, cache.py, prefixes.py, routes.py

Requests arrive over HTTP and become ``Sequence`` objects, which the engine's thread passes to the core; each iteration
of the core admits, prefills and decodes. ``local.py`` is the same engine without a server, inside the caller's process.
"""
