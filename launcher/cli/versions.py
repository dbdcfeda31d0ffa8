"""``rl-async --version``. Imports no package whose version it tells."""

import platform
from importlib import metadata

from rl_async.configs.engines import ENGINES
from rl_async.installation import commit, version


def version_lines() -> list[str]:
    """Return a line for rl-async, with its commit if known, and one for each package here that runs depend on."""
    made_from = commit()
    lines = [f"rl-async {version()}" + (f" (commit {made_from})" if made_from else "")]
    lines.append(f"python {platform.python_version()}")
    engines = [name for traits in ENGINES.values() if traits.package for name in (traits.package, *traits.builds)]
    for name in ("torch", "transformers", *engines):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return lines
