"""The FSDP2 backend: Transformers models under ``fully_shard``, optionally replicated (HSDP) and sequence-parallel.

``backend`` implements ``interface.Backend``; ``sharding`` decides how layers are spread over ranks and recomputed.
"""
