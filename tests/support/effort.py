"""How many random examples a property test tries: all of them in ``.ci/run``, a part of them in a developer's loop."""

import os

ALL_EXAMPLES = bool(os.environ.get("ALL_EXAMPLES"))  # set by .ci/run


def examples(count: int) -> int:
    """``count`` where the environment has ``ALL_EXAMPLES``, else a fifth, but 10 at least."""
    return count if ALL_EXAMPLES else max(10, count // 5)
