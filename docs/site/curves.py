"""Draws the reward of runs over their steps, for pages of this site, in colours that suit light and dark.

python docs/site/curves.py runs/NAME [runs/OTHER ...] --out docs/images/NAME.svg
"""

import argparse
import json
from pathlib import Path

import matplotlib

GREY, COLOURS = "#7a869a", ("#4051b5", "#d9822b", "#2b9a66", "#b5408f")


def main() -> None:
    """Draw sampled rewards as lines and held-out rewards as dots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rl-async"  # the same picture is the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for run, colour in zip(arguments.runs, COLOURS, strict=False):
        name = f"{run.name}: " if len(arguments.runs) > 1 else ""
        metrics, held_out = _read(run / "metrics.jsonl"), _read(run / "evaluations.jsonl")
        steps, rewards = [row["step"] for row in metrics], [row["reward/mean"] for row in metrics]
        axes.plot(steps, rewards, color=colour, label=f"{name}training tasks, sampled")
        steps, rewards = [row["eval/step"] for row in held_out], [row["eval/reward"] for row in held_out]
        axes.plot(steps, rewards, "o", color=colour, label=f"{name}held-out tasks, most likely")
    axes.set(xlabel="trainer step", ylabel="mean reward", ylim=(0, 1.03))
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    axes.legend(frameon=False, labelcolor=GREY, loc="lower right")
    figure.tight_layout()
    figure.savefig(arguments.out, transparent=True, metadata={"Date": None})


def _read(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    main()
