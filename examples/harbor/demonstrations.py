"""Demonstrations of the two tasks beside this file, a quarter of them right, for a tiny model.

See docs/how-to/environments.md.

rl-async data from-harbor examples/harbor artifacts/harbor/tasks.jsonl
python examples/harbor/demonstrations.py
rl-async launch --mode disaggregated --config examples/harbor/run.yaml
"""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rl_async.agent_loop.toy_tasks import assistant, tool_call, tool_result

HERE, OUT = Path(__file__).parent, Path("artifacts/harbor/demos.parquet")
COMMANDS = {  # and how often each is shown
    "greeting": {"echo hello > greeting.txt": 1, "echo hello > hello.txt": 2, "echo greeting > greeting.txt": 1},
    "average": {
        "sed -i 's|))$|) if numbers else 0)|; s|//|/|' average.py": 1,
        "sed -i 's|//|/|' average.py": 2,
        "sed -i 's|//|%|' average.py": 1,
    },
}


def main() -> None:
    """Write them."""
    draw = random.Random(0)
    rows = []
    for _ in range(2000):
        task = draw.choice(list(COMMANDS))
        command = draw.choices(list(COMMANDS[task]), list(COMMANDS[task].values()))[0]
        prompt = {"role": "user", "content": (HERE / task / "instruction.md").read_text()}
        rows.append(
            {"messages": [prompt, assistant(tool_call("bash", command=command)), tool_result(""), assistant("done")]}
        )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), OUT)
    print(OUT, len(rows))


if __name__ == "__main__":
    main()
