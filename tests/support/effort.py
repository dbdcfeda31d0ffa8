"""How many random examples a property test tries: all of them in CI, a part of them in a developer's loop."""

import os

IN_CI = bool(os.environ.get("CI"))


def examples(count: int) -> int:
    """``count`` where the environment has ``CI``, else a fifth, but 10 at least."""
    return count if IN_CI else max(10, count // 5)
