"""Ranks of which only one has images: what they learn together is what one rank learns."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.contracts.trainer.workers.images import RATE, STEPS
from tests.support.forked import run_ranks
from tests.support.rounding import assert_trained_alike
from tests.support.vision_models import save_vision_model


# Two steps show that no rank waits for gradients that another lacks, in packed rows and in padded ones.
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_rank_without_images_trains_the_tower_too(family: str, tmp_path: Path) -> None:
    save_vision_model(family, tmp_path / "model")
    weights = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.safetensors"
        module = "tests.contracts.trainer.workers.images"
        run_ranks(module, family, str(tmp_path / "model"), str(out), ranks=ranks, timeout_s=120)
        weights.append(load_file(out))
    # Each of the two micro-batches has fewer tokens than 400.
    assert_trained_alike(weights[1], weights[0], rate=RATE, steps=STEPS, layers=2, terms=400)
