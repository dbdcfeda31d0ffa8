"""The versions of other packages that this project supports; pyproject.toml has the same ranges."""

import re

from rl_async.configs.engines import ENGINES

ENGINE_PACKAGES = {traits.package: traits.versions for traits in ENGINES.values() if traits.package}
RANGES = {"torch": ">=2.11", "transformers": ">=5"} | ENGINE_PACKAGES


def holds(version: str, wanted: str) -> bool:
    """Whether ``version`` is in a range, of the forms that pyproject.toml uses: ``>=A.B``, ``==A.B.*`` and ``==A.B.C``.

    What follows the numbers (``+cpu``, ``rc1``) is left out of the comparison.
    """
    numbers = _numbers(version)
    bound = _numbers(wanted.lstrip("=>").removesuffix(".*"))
    if wanted.startswith(">="):
        return numbers >= bound
    return numbers[: len(bound)] == bound if wanted.endswith(".*") else numbers == bound


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
