"""Labels the buckets of one publication with their version and position, for engines that keep them."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from rl_async.messages import Version
from rl_async.weight_sync.buckets import adapters
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.protocol import Hold


def numbered(buckets: Sequence[Bucket], version: Version, hold: Hold) -> Sequence[Bucket]:
    """Return ``buckets`` labelled for engines that keep them; the bytes are shared with the originals.

    Engines always keep adapters and the base they belong to, and load them once both are complete.
    """
    added = adapters.adapter_buckets(buckets)
    if added:
        base = [bucket for bucket in buckets if bucket.info.kind != "adapter"]
        name = adapters.base_name(base)
        return [*_labelled(base, name, "stage"), *_labelled(added, str(version), "stage", base=name)]
    return buckets if hold == "no" else _labelled(buckets, str(version), hold)


def _labelled(buckets: Sequence[Bucket], version: str, hold: Hold, base: str = "") -> list[Bucket]:
    return [
        replace(
            bucket,
            info=msgspec.structs.replace(
                bucket.info, hold=hold, version=version, index=index, count=len(buckets), base=base
            ),
        )
        for index, bucket in enumerate(buckets)
    ]
