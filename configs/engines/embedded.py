"""Traits of the embedded engine, a Transformers model in a process of rl-async. It reads the run's config itself."""

from rl_async.configs.engines.traits import EngineTraits

EMBEDDED = EngineTraits(
    title="the embedded engine",
    module="rollout_server",
    memory_flags={"--cache-bytes": "cache_bytes"},
    json_package="llguidance",
    quantization={"int8": (), "fp8": ()},
)
