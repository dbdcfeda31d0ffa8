"""Keys that earlier versions had. The error about an unknown key looks here first, so that an old config is told what
to write instead. To rename a key, change its struct and add a line."""

MOVED: dict[str, str] = {  # old key or section -> the key that does the same now
    "sft": "warm_start",
}


def replacement(key: str) -> str | None:
    """What an old key became, as the end of an error message; None if there never was such a key."""
    section, rest = key, ""
    while section:
        if section in MOVED:
            return f"; it is now {MOVED[section]}{rest}"
        section, _, leaf = section.rpartition(".")
        rest = f".{leaf}{rest}"
    return None
