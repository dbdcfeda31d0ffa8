"""The keys and defaults that `rl-async config from-verl` and `from-trl` go by are those of the installed projects."""

from pathlib import Path

import pytest
import torch

from rl_async.configs.importing import trl as trl_keys
from rl_async.configs.importing import verl as verl_keys
from rl_async.configs.importing.translation import Values, flatten, resolve_references
from rl_async.configs.load import load_config, parse
from tests.contracts.oracles.oracle import Case, Oracle

pytestmark = pytest.mark.slow
OF_A_SCRIPT = {"model_name_or_path", "dataset_name"}  # of TRL's other dataclasses, which its scripts read together


def settings(oracle: Oracle) -> str:
    """The project's own defaults, as text."""
    [answer] = oracle.ask("settings", [Case({"any": torch.zeros(1)}, torch.float64)])
    return bytes(answer["text"].tolist()).decode()


def test_verls_keys_and_defaults(verl: Oracle) -> None:
    theirs, _ = resolve_references(flatten(parse(settings(verl), "verl")))
    for key in (*verl_keys.KEYS, *verl_keys.ENGINE_KEYS, *verl_keys.CRITIC_KEYS):
        assert key.theirs in theirs, key
        if key.default is not None:
            assert key.default == theirs[key.theirs], key


def test_trls_fields_and_defaults(trl: Oracle) -> None:
    theirs: Values = parse(settings(trl), "TRL")
    for key in trl_keys.KEYS:
        assert key.theirs in theirs or key.theirs in OF_A_SCRIPT, key
        if key.default is not None:
            assert key.default == theirs[key.theirs], key


def test_verls_whole_default_config_becomes_one_of_ours(verl: Oracle, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(settings(verl))
    ours.write_text(verl_keys.write(theirs, ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]))
    config = load_config(str(ours))
    assert (config.algorithm.clip_high, config.algorithm.loss_options.clip_dual) == (0.2, 3.0)
