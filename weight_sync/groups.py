"""Who is updated together, and with what: pure functions of members and buckets."""

from collections.abc import Sequence

import msgspec

from rl_async.messages import Version
from rl_async.weight_sync.buckets import adapters
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.protocol import Hold
from rl_async.weight_sync.wave import Member


def split(members: Sequence[Member], waves: int) -> list[list[Member]]:
    """At most ``waves`` groups of nearly equal size that are updated one after another; none is empty."""
    return [group for i in range(waves) if (group := list(members[i::waves]))]


def by_base(members: Sequence[Member], base: Version | None) -> list[list[Member]]:
    """Those that hold ``base``, and those that do not; empty groups are left out. Without a base all are one group."""
    if base is None:
        return [list(members)]
    holders = [member for member in members if member.held == base]
    others = [member for member in members if member.held != base]
    return [group for group in (holders, others) if group]


def address(buckets: Sequence[Bucket], version: Version, hold: Hold) -> Sequence[Bucket]:
    """Buckets that say which one of which version they are, for engines that keep them. The bytes are shared.

    Of adapters and their base engines always keep a copy, and load when they have all.
    """
    added = adapters.alone(buckets)
    if added:
        base = [bucket for bucket in buckets if bucket.info.kind != "adapter"]
        name = adapters.base_name(base)
        return [*_numbered(base, name, "stage"), *_numbered(added, str(version), "stage", base=name)]
    return buckets if hold == "no" else _numbered(buckets, str(version), hold)


def _numbered(buckets: Sequence[Bucket], version: str, hold: Hold, base: str = "") -> list[Bucket]:
    return [
        Bucket(
            bucket.data,
            msgspec.structs.replace(
                bucket.info, hold=hold, version=version, index=index, count=len(buckets), base=base
            ),
        )
        for index, bucket in enumerate(buckets)
    ]
