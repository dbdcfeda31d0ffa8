"""Command lines by which processes of this project start others of it."""

import sys


def own_module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of ``rl_async.NAME``.

    ``-P`` keeps the working directory out of the search for modules: a user's ``random.py`` or ``queue.py`` there would
    else be imported in place of the standard library's. Users' code finds its neighbours by ``userload``.
    """
    return (sys.executable, "-P", "-m", f"rl_async.{name}", *arguments)
