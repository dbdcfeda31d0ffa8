"""Truncated samplers of other projects become `rollout.truncation`, or are refused where it cannot hold them."""

from pathlib import Path

import pytest

from rl_async.configs.importing import SOURCES
from rl_async.configs.load import load_config, parse
from rl_async.configs.schema.rollout import TruncationConfig
from rl_async.errors import ConfigError

FILES = {
    "verl": (
        "run.sh",
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=t.parquet "
        "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name={engine} "
        "actor_rollout_ref.rollout.top_k={top_k} actor_rollout_ref.rollout.top_p={top_p}\n",
    ),
    "trl": (
        "grpo.yaml",
        "model_name_or_path: m\ndataset_name: t.parquet\nnum_generations: 8\ntop_k: {top_k}\ntop_p: {top_p}\n"
        "use_vllm: true\n",
    ),
    "prime-rl": (
        "rl.toml",
        "max_steps = 20\nseq_len = 512\n[model]\nname = 'm'\n[orchestrator]\ngroup_size = 8\n"
        "[[orchestrator.train.source]]\nid = 'math'\n"
        "[orchestrator.train.sampling.extra_body]\ntop_k = {top_k}\ntop_p = {top_p}\n",
    ),
}


def translated(folder: Path, source: str, top_k: int, top_p: float, engine: str = "vllm") -> str:
    name, text = FILES[source]
    (folder / name).write_text(text.format(top_k=top_k, top_p=top_p, engine=engine))
    return SOURCES[source](folder / name, [])


@pytest.mark.parametrize("source", FILES)
@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (16, 1.0, TruncationConfig(top_k=16)),
        (5, 0.9, TruncationConfig(top_k=5, top_p=0.9)),
        (0, 0.75, TruncationConfig(top_k=16, top_p=0.75)),
        (-1, 1, None),
    ],
)
def test_a_truncated_sampler_is_ours(
    tmp_path: Path, source: str, top_k: int, top_p: float, expected: TruncationConfig | None
) -> None:
    written = translated(tmp_path, source, top_k, top_p)
    (tmp_path / "ours.yaml").write_text(written)
    given = ["data.path=t.parquet", "model.path=m"]
    assert load_config(str(tmp_path / "ours.yaml"), given).rollout.truncation == expected
    # The approximation, where one is made, is told.
    assert ("rollout.truncation.top_k: " in written) == (top_k <= 0 and top_p < 1)


@pytest.mark.parametrize("source", FILES)
@pytest.mark.parametrize("top_k", [1, 17, -2])
def test_a_number_of_tokens_that_engines_cannot_name_is_an_error(tmp_path: Path, source: str, top_k: int) -> None:
    with pytest.raises(ConfigError, match=f"top_k={top_k}"):
        translated(tmp_path, source, top_k, 1.0)


def test_an_engine_that_does_not_name_kept_tokens_is_named(tmp_path: Path) -> None:
    written = translated(tmp_path, "verl", 5, 0.9, "sglang")
    assert parse(written, "written")["rollout"]["truncation"] == {"top_k": 5, "top_p": 0.9}
    assert "rollout.engine=sglang" in written.partition("Refused as it stands")[2]
