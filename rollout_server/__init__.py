"""Rollout engines: their common interface, a client for each HTTP dialect, and the pool in front of them.

An engine takes token ids with sampling parameters and returns sampled tokens, each with its log-probability and weight
version (``api.py``). Agent workers call the pool (``pool.engine_pool``), which routes requests and replays those lost
with an engine; the trainer's weight sync and the command line call one engine's client (``pool.connect``).

    embedded/   our own engine, a Transformers model with continuous batching, behind vLLM's HTTP dialect
    vllm/       the client of that dialect, and our code inside a vLLM server
    sglang/     the client of SGLang's native API, and the process around an SGLang server

To add a kind of engine, write a package here with its client and its ``__main__.py``, add the client to
``pool.connect``, and declare the kind in ``configs/engines.py``, which the config checks and the launcher follow.
"""
