"""How far each family of vision-language models is from its references, on tiny models with random weights.

    python -m benchmarks.vision_families [--conversations 200]

ids: made conversations whose token ids or images differ from those of the family's Hugging Face processor. gradients:
the largest difference between the gradients of packed rows (Gemma 3: padded rows) and of rows alone in the plain model,
both in float64, over the largest gradient. engine: mean and largest difference between the log-probabilities of the
embedded engine and of the trainer in float32. The tests of these three hold the same numbers to bounds.
"""

import argparse
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers.utils import logging

from rl_async.pictures import FAMILIES
from tests.unit.rl_async.test_pictures import compared_with_the_family
from tests.unit.rollout_server.embedded.test_vision import family_in, off_from_the_trainer
from tests.unit.trainer.test_families import packed_and_alone


def gradient_error(family: str, share: bool, folder: Path) -> float:
    """The largest difference of gradients, over the largest gradient of the plain model."""
    model, plain, _ = packed_and_alone(family, share, folder)
    mine = {name: parameter.grad for name, parameter in model.lm.named_parameters()}
    theirs = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    worst = max(float((mine[name] - grad).abs().max()) for name, grad in theirs.items())
    return worst / max(float(grad.abs().max()) for grad in theirs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=200)
    options = parser.parse_args()
    logging.disable_progress_bar()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"{'family':14}{'images':>8}{'differ':>8}{'gradients':>12}{'shared':>12}{'engine mean':>14}{'largest':>12}")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
            folder = Path(name)
            images, differing = compared_with_the_family(family, options.conversations, folder / "ids", patch)
            gradients = [gradient_error(family, share, folder / str(share)) for share in (False, True)]
            off = torch.cat(off_from_the_trainer(family_in(folder / "engine", family)))
        print(
            f"{family:14}{images:8}{len(differing):8}{gradients[0]:12.1e}{gradients[1]:12.1e}"
            f"{off.mean():14.1e}{off.max():12.1e}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
