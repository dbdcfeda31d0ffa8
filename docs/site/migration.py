"""Tables of which key of another project is which of ours, from the declarations that `rl-async config from-…` uses."""

import re

from markup import code, table

from rl_async.configs.importing import prime_rl, slime, trl, verl

TABLES = {
    "verl": (verl.KEYS + verl.MEGATRON_KEYS + verl.ENGINE_KEYS + verl.CRITIC_KEYS, verl.NO_COUNTERPART),
    "slime": (slime.KEYS, slime.NO_COUNTERPART),
    "prime-rl": (prime_rl.KEYS + prime_rl.ADAM_KEYS, prime_rl.NO_COUNTERPART),
    "trl": (trl.KEYS + trl.LORA_KEYS, trl.NO_COUNTERPART),
}
_PLACE = re.compile(r"^\{\{ keys of ([\w-]+) \}\}$", re.MULTILINE)


def fill(text: str) -> str:
    """Replace each line ``{{ keys of PROJECT }}`` by that project's table."""
    return _PLACE.sub(lambda match: _table(match[1]), text)


def _table(project: str) -> str:
    keys, none = TABLES[project]
    rows = [
        (code(key.theirs), f"`{key.ours}`", code(str(key.default)) if key.default is not None else "") for key in keys
    ]
    left = [(code(name), reason) for name, reason in none.items()]
    return (
        table([project, "rl-async", f"{project}'s default"], rows)
        + "\nWithout a counterpart:\n\n"
        + table([project, "instead"], left)
    )
