"""Keys that earlier versions had. The error about an unknown key looks here first, so that an old config is told what
to write instead. To rename a key, change its struct and add a line."""

MOVED: dict[str, str] = {  # old key or section -> the key that does the same now; in brackets, how its value differs
    "sft": "warm_start",
    "trainer.min_train_s": "debug.min_train_s",
    "rollout.min_iteration_s": "debug.min_iteration_s",
    "weight_sync.bucket_mb": "weight_sync.bucket_bytes (bytes, not MiB)",
    "rollout.cpu_cache_gb": "rollout.cpu_cache_bytes (bytes, not GiB)",
}
GONE: dict[str, str] = {  # old key -> why it is gone
    "trainer.context_parallel": "rows are never split over Megatron ranks; use trainer.tensor_parallel",
}


def replacement(key: str) -> str | None:
    """What an old key became, as the end of an error message; None if there never was such a key."""
    if key in GONE:
        return f"; it was removed: {GONE[key]}"
    section, rest = key, ""
    while section:
        if section in MOVED:
            return f"; it is now {MOVED[section]}{rest}"
        section, _, leaf = section.rpartition(".")
        rest = f".{leaf}{rest}"
    return None
