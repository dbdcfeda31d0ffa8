"""Trainer and engine compute alike under ``model.override``, and exports record it."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_async.configs.schema.data import ATTENTION_KEY, OverrideConfig, RopeConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.launcher.sources import overridden_folder
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence, why_not_served
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import collate
from tests.conftest import make_rows
from tests.support.rounding import PlainPass, pass_rounding

pytestmark = pytest.mark.usefixtures("one_rank")


def test_trainer_and_engine_agree_under_it_and_the_canary_would_see_another(model_folder: Path, tmp_path: Path) -> None:
    folder = overridden_folder(model_folder, OverrideConfig(rope=RopeConfig(rope_type="linear", factor=16.0)), tmp_path)
    sequence = Sequence("0", [5, 9, 2, 7], Sampling(), 40, frozenset(), None, lambda _: None)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert why_not_served(served.config) is None
    core = EngineCore(served, max_batch=2, max_length=64)
    core.add(sequence)
    while not core.step():
        pass
    errors = PlainPass(served).errors(sequence.tokens, sequence.logprobs, 1.0)
    assert (errors <= 1).all()
    row = msgspec.structs.replace(
        make_rows(0)[0],
        token_ids=torch.tensor(sequence.tokens, dtype=torch.int32).numpy(),
        loss_mask=torch.tensor([False] * 4 + [True] * 40).numpy(),
    )
    tensors = collate([row], device="cpu")
    trained, plain = (
        Fsdp2Backend(str(path), "float32", "cpu", TrainerConfig()).forward(tensors).logprobs[0, 3:].double()
        for path in (folder, model_folder)
    )
    bound = PlainPass(served)
    assert (bound.errors(sequence.tokens, trained.tolist(), 1.0) <= 1).all()
    assert (bound.errors(sequence.tokens, plain.tolist(), 1.0) > 1).any()


def test_the_attention_of_transformers_pads_rows_and_gives_the_same(model_folder: Path, tmp_path: Path) -> None:
    folder = overridden_folder(model_folder, OverrideConfig(attention="eager"), tmp_path)
    tensors = collate(make_rows(0)[:3], device="cpu")
    packed = Fsdp2Backend(str(model_folder), "float32", "cpu", TrainerConfig())
    padded = Fsdp2Backend(str(folder), "float32", "cpu", TrainerConfig())
    assert padded.model.lm.config._attn_implementation == "eager" and not padded.model.packs
    assert packed.model.packs
    a, b = (model.forward(tensors).logprobs[tensors.mask] for model in (packed, padded))
    assert (a - b).abs().max() <= pass_rounding(float(a.abs().max()), layers=2, terms=64)
    out = tmp_path / "step"
    (out / "shards").mkdir(parents=True)
    padded._describe(out)
    written = json.loads(next(out.rglob("config.json")).read_text())
    assert written[ATTENTION_KEY] == "eager"


def test_an_implementation_that_is_not_installed_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = overridden_folder(model_folder, OverrideConfig(attention="flash_attention_2"), tmp_path)
    with pytest.raises(UserError, match=r"model\.path"):
        Fsdp2Backend(str(folder), "float32", "cpu", TrainerConfig())
