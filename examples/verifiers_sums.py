"""An environment of verifiers' own, its adapter of reasoning-gym, and the tasks of a run on it.

See docs/how-to/environments.md.

    scripts/install environments                     # verifiers, on top of .venv
    export PYTHONPATH=examples                       # where verifiers finds environments by name
    .venv-environments/bin/python examples/verifiers_sums.py
    .venv-environments/bin/python -m rl_async.launcher.cli launch --mode disaggregated \\
        --config examples/verifiers_sums.yaml
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import verifiers
from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

from rl_async.extraction import last_number

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def load_environment() -> ReasoningGymEnv:
    """Return the environment, as verifiers asks for it."""
    return ReasoningGymEnv(
        gym=[{"name": "chain_sum", "weight": 1.0, "config": SUMS}],
        num_train_examples=256,
        num_eval_examples=32,
        system_prompt="Reply with the number only.",
        parser=verifiers.Parser(extract_fn=lambda answer: last_number(answer) or ""),  # it knows no <answer> tags
    )


def main() -> None:
    """Write the environment's tasks as data sets have them: the row's answer is the ground truth."""
    folder = Path("artifacts/verifiers_sums")
    folder.mkdir(parents=True, exist_ok=True)
    world = verifiers.load_environment("verifiers_sums")
    for name, rows in (("train", world.get_dataset()), ("test", world.get_eval_dataset())):
        tasks = [
            {
                "data_source": "verifiers_sums",
                "prompt": row["prompt"],
                "reward_model": {"style": "rule", "ground_truth": row["answer"]},
                "extra_info": {"index": row["example_id"], "info": row["info"]},
            }
            for row in rows
        ]
        pq.write_table(pa.Table.from_pylist(tasks), folder / f"{name}.parquet")
        print(folder / f"{name}.parquet", len(tasks))


if __name__ == "__main__":
    main()
