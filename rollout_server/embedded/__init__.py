"""The embedded engine: a Transformers model with continuous batching, behind vLLM's HTTP dialect.

    server.py (HTTP) -> engine_thread.py -> core.py -> sampler.py, cache.py

Requests arrive over HTTP and become ``Sequence`` objects, which the engine's thread passes to the core. Each iteration
of the core admits, prefills and decodes. ``LocalEngine`` is the same engine without a server, in the caller's process.
"""
