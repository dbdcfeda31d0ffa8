"""An agent loop that calls every tool of the run, whatever the model says: TIMES over, so that sessions live a while.

Given as ``agent.loop`` of a run, which reads the file by its path. The tasks of presets name a loop of their own, so
the run needs others: ``write_tasks``.
"""

import asyncio
import json
from pathlib import Path

from rl_async.agent_loop.chat_formats.format import ParsedCall
from rl_async.agent_loop.episode import Episode

TIMES = 5
PAUSE_S = 0.2
SUM = {"expression": "20 + 3 * 7"}
ARGUMENTS: dict[str, dict[str, object]] = {  # of tools; any other is a calculator
    "python": {
        "code": "import os, time; open('seen', 'a').write('x'); time.sleep(0.3); print(os.stat('seen').st_size)"
    },
    "bash": {
        "command": "setsid sleep 600 & echo here >> seen; sleep 0.3; wc -c seen"
    },  # the rest ends with its program
}


def write_tasks(path: Path) -> None:
    """Write a few tasks that leave the choice of the loop to the config."""
    rows = [
        {
            "data_source": "calculator",
            "prompt": [{"role": "user", "content": f"what is {number}+{number}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        }
        for number in range(16)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def play(episode: Episode) -> str:
    """Sample one answer, then call the tools."""
    reason = await episode.generate()
    given = [(name, ARGUMENTS.get(name, SUM)) for name in episode.tools]
    calls = [ParsedCall(name, arguments, json.dumps(arguments)) for name, arguments in given]
    for _ in range(TIMES):
        await episode.call(calls)
        await asyncio.sleep(PAUSE_S)
    return reason
