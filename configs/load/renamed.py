"""Keys of earlier versions, so that an error about an unknown key can name what replaced it.

To rename a key, change its struct and add a line here.
"""

MOVED: dict[str, str] = {  # old key or section -> its new name; in brackets, how the value differs
    "sft": "warm_start",
    "trainer.context_parallel": "trainer.sequence_parallel",
    "trainer.min_train_s": "debug.min_train_s",
    "rollout.min_iteration_s": "debug.min_iteration_s",
    "weight_sync.bucket_mb": "weight_sync.bucket_bytes (bytes, not MiB)",
    "rollout.cpu_cache_gb": "rollout.cache_bytes (bytes, not GiB)",
    "rollout.cpu_cache_bytes": "rollout.cache_bytes",
}
ABSENT: dict[str, str] = {  # key that was removed, or that other software has -> what to do instead
    "trainer.attention": "PyTorch's FlashAttention is used where it can be; leave the key out",
    "rollout.data_parallel": "every copy of the model is an engine of its own; use rollout.engines",
}

# Keys that were removed and changed no result; complete configs that earlier versions wrote into run folders have them.
DROPPED = ("trainer.attention",)


def replacement(key: str) -> str | None:
    """Return the end of an error message that says what replaced an old key; None if there never was such a key."""
    if key in ABSENT:
        return f"; {ABSENT[key]}"
    section, rest = key, ""
    while section:
        if section in MOVED:
            return f"; it is now {MOVED[section]}{rest}"
        section, _, leaf = section.rpartition(".")
        rest = f".{leaf}{rest}"
    return None
