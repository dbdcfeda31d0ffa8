"""Keys of earlier versions, so that an error about an unknown key can name what replaced it.

To rename a key, change its struct and add a line here.
"""

MOVED: dict[str, str] = {  # old key or section -> its new name; in brackets, how the value differs
    "sft": "warm_start",
    "trainer.min_train_s": "debug.min_train_s",
    "rollout.min_iteration_s": "debug.min_iteration_s",
    "weight_sync.bucket_mb": "weight_sync.bucket_bytes (bytes, not MiB)",
    "rollout.cpu_cache_gb": "rollout.cpu_cache_bytes (bytes, not GiB)",
}
GONE: dict[str, str] = {  # old key -> why there is no replacement
    "trainer.context_parallel": "rows are never split over Megatron ranks; use trainer.tensor_parallel",
}


def replacement(key: str) -> str | None:
    """Return the end of an error message that says what replaced an old key; None if there never was such a key."""
    if key in GONE:
        return f"; it was removed: {GONE[key]}"
    section, rest = key, ""
    while section:
        if section in MOVED:
            return f"; it is now {MOVED[section]}{rest}"
        section, _, leaf = section.rpartition(".")
        rest = f".{leaf}{rest}"
    return None
