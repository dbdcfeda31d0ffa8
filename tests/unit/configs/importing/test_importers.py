"""Configs of TRL, prime-rl and slime become ours; keys that the tables name exist, and so do names in hints."""

import re
from pathlib import Path

import pytest
import yaml

from rl_async.configs import suggestions
from rl_async.configs.explain import choices, field_at
from rl_async.configs.importing import prime_rl, slime, trl, verl
from rl_async.configs.importing.importers import SOURCES
from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import ADVANTAGES, LOSSES
from rl_async.configs.schema.data import CurriculumConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.launcher.cli.training_commands import IMPORT_HELP

VERL_ROLLOUT = "actor_rollout_ref.rollout"
TRL = """
model_name_or_path: m
dataset_name: t.parquet
loss_type: dr_grpo
importance_sampling_level: sequence
epsilon_high: 0.3
delta: 2.0
scale_rewards: none
num_generations: 4
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
use_vllm: true
vllm_importance_sampling_mode: token_truncate
max_steps: 5
of_tomorrow: 1
"""
PRIME_RL = """
max_steps = 9
[model]
name = "m"
[orchestrator]
batch_size = 64
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 32
[trainer.optim]
lr = 3e-6
[trainer.loss]
dppo_mask_high = 0.3
kl_tau = 0.0
[of_tomorrow]
key = 1
"""
SLIME = """
source "${HERE}/models/m.sh"
ARGS=(
   --hf-checkpoint /models/m  # --load /elsewhere
   --prompt-data /data/t.jsonl
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --global-batch-size 64
   --advantage-estimator gspo
   --eps-clip-high 0.28
   --use-tis
   --rollout-max-prompt-len 77
   --of-tomorrow
)
ray job submit -- python3 train.py ${ARGS[@]} --num-rollout=11
"""


def translated(tmp_path: Path, source: str, name: str, text: str, *more: str) -> tuple[RunConfig, str]:
    """Our config for ``text`` in a file, loaded, and all that was written."""
    (tmp_path / name).write_text(text)
    written = SOURCES[source](tmp_path / name, list(more))
    (tmp_path / "ours.yaml").write_text(written)
    return load_config(str(tmp_path / "ours.yaml"), ["data.path=t.parquet"]), written


def test_a_grpo_config_of_trls(tmp_path: Path) -> None:
    config, text = translated(tmp_path, "trl", "c.yaml", TRL, "beta=0.5")
    algorithm = config.algorithm
    assert (algorithm.loss, algorithm.aggregation, algorithm.advantage) == (
        "gspo",
        "seq-mean-token-sum-norm",
        "dr_grpo",
    )
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.3)
    assert algorithm.loss_options.clip_dual is None, "gspo has no dual clip"
    assert (algorithm.correction, algorithm.correction_options.cap) == ("decoupled_token_is", 3.0)
    assert (algorithm.kl.coef, algorithm.kl.unbiased, config.trainer.steps) == (0.5, True, 5)
    assert algorithm.norm_length == config.rollout.max_tokens
    assert (config.data.train_batch_groups, config.trainer.minibatches, config.rollout.engine) == (4, 1, "vllm")
    for key in ("of_tomorrow", "trainer.schedule", "max_staleness", "clip_dual=2.0"):
        assert key in text


@pytest.mark.parametrize(("given", "epochs"), [("max_steps=-1", "3.0"), ("num_train_epochs=7", "7")])
def test_passes_over_the_data_by_which_trl_ends_are_steps_here(tmp_path: Path, given: str, epochs: str) -> None:
    text = translated(tmp_path, "trl", "c.yaml", TRL.replace("max_steps: 5", ""), given)[1]
    (note,) = re.findall(r"num_train_epochs=\S+: [^\n]*", text)
    assert note.startswith(f"num_train_epochs={epochs}: ") and "trainer.steps" in text
    assert "num_train_epochs=" not in translated(tmp_path, "trl", "c.yaml", TRL)[1], "max_steps overrides it"


def test_a_toml_of_prime_rls(tmp_path: Path) -> None:
    config, text = translated(tmp_path, "prime-rl", "rl.toml", PRIME_RL, "trainer.optim.weight_decay=0.5")
    assert (config.data.train_batch_groups, config.rollout.group_size, config.rollout.max_tokens) == (4, 16, 32)
    assert (config.trainer.learning_rate, config.trainer.weight_decay, config.trainer.steps) == (3e-6, 0.5, 9)
    assert (config.algorithm.correction, config.algorithm.advantage) == ("prime_rl", "dr_grpo")
    options = config.algorithm.loss_options
    assert (options.dppo_tv, options.dppo_high, options.ipo_penalty) == (0.2, 0.3, 0.0)
    assert config.queue.max_staleness == 8
    for key in ("of_tomorrow.key", "beta2", "max_staleness"):
        assert key in text


def test_prime_rls_pools_are_a_curriculum(tmp_path: Path) -> None:
    buffer = "orchestrator.buffer"
    given = [f"{buffer}.easy_threshold=1.0", f"{buffer}.hard_threshold=0.0", f"{buffer}.easy_fraction=0.2"]
    config, text = translated(
        tmp_path, "prime-rl", "rl.toml", PRIME_RL, *given, f"{buffer}.online_difficulty_filtering=true"
    )
    assert config.data.curriculum == CurriculumConfig(easy=1.0, hard=0.0)
    assert config.algorithm.shaping.dynamic_sampling is True
    assert "easy_fraction" in text


def test_devices_of_an_engine_are_not_counted_as_engines(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(PRIME_RL)
    given = ["deployment.num_infer_gpus=8", "inference.parallel.tp=4"]
    rollout = yaml.safe_load(SOURCES["prime-rl"](tmp_path / "rl.toml", given))["rollout"]
    assert (rollout["engines"], rollout["tensor_parallel"]) == (2, 4)


def test_flags_of_slimes(tmp_path: Path) -> None:
    config, text = translated(tmp_path, "slime", "run.sh", SLIME)
    assert (config.model.path, config.trainer.steps, config.trainer.minibatches) == ("/models/m", 11, 4)
    assert (config.algorithm.loss, config.algorithm.advantage) == ("gspo", "grpo")
    assert (config.algorithm.clip_high, config.algorithm.correction) == (0.28, "slime_tis")
    assert (config.trainer.backend, config.rollout.engine) == ("megatron", "sglang")
    assert config.data.max_prompt_tokens == 77
    assert "of-tomorrow" in text and "load =" not in text


@pytest.mark.parametrize(
    ("flags", "temperature", "said"),
    [
        ("--rollout-temperature 0.5 2>&1 | tee log", 0.5, ""),
        ("--rollout-temperature 0.5 || exit", 0.5, ""),
        ("--rollout-temperature $HEAT", 1.0, "rollout-temperature"),
        ("--rollout-temperature 0.5 --colocate ${MORE[@]}", 0.5, ""),
        ("--rollout-temperature 0.5 --entropy-coef -0.1", 0.5, "-0.1"),
    ],
)
def test_the_shells_own_words_are_no_values(tmp_path: Path, flags: str, temperature: float, said: str) -> None:
    (tmp_path / "run.sh").write_text(f"{SLIME} {flags}\n")
    text = SOURCES["slime"](tmp_path / "run.sh", [])
    assert said in text and yaml.safe_load(text)["rollout"].get("temperature", 1.0) == temperature


@pytest.mark.parametrize(
    ("source", "name", "text", "given"),
    [
        ("verl", "run.sh", f"main_ppo {VERL_ROLLOUT}.name=vllm", f"{VERL_ROLLOUT}.tensor_model_parallel_size=2"),
        ("trl", "c.yaml", TRL, "vllm_tensor_parallel_size=2"),
        ("prime-rl", "rl.toml", PRIME_RL, "inference.parallel.tp=2"),
        ("slime", "run.sh", SLIME, "rollout-num-gpus-per-engine=2"),
    ],
)
def test_ranks_of_an_engine_are_taken_over(tmp_path: Path, source: str, name: str, text: str, given: str) -> None:
    (tmp_path / name).write_text(text)
    written = yaml.safe_load(SOURCES[source](tmp_path / name, [given]))
    assert (written["rollout"]["tensor_parallel"], "engine_args" in written["rollout"]) == (2, False)


def test_a_micro_batch_of_slimes_is_of_the_whole_rows_that_ranks_share(tmp_path: Path) -> None:
    assert translated(tmp_path, "slime", "run.sh", SLIME)[0].trainer.max_tokens_per_microbatch == 16384  # our default
    given = "max-tokens-per-gpu=9216"
    assert translated(tmp_path, "slime", "run.sh", SLIME, given)[0].trainer.max_tokens_per_microbatch == 9216
    written = SOURCES["slime"](tmp_path / "run.sh", [given, "context-parallel-size=4"])
    assert yaml.safe_load(written)["trainer"]["max_tokens_per_microbatch"] == 4 * 9216


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, source: str) -> None:
    for name in ("missing.yaml", "missing.toml", "missing.sh"):
        with pytest.raises(ConfigError, match=name):
            SOURCES[source](tmp_path / name, [])


def test_the_command_line_offers_every_source() -> None:
    assert IMPORT_HELP.keys() == SOURCES.keys()


@pytest.mark.parametrize("module", [verl, trl, prime_rl, slime])
def test_the_tables_name_keys_that_exist(module: object) -> None:
    for table in ("KEYS", "OTHER_KEYS", "ENGINE_KEYS", "CRITIC_KEYS", "MEGATRON_KEYS", "ADAM_KEYS", "LORA_KEYS"):
        for key in getattr(module, table, ()):
            assert field_at(key.ours) is not None, key


def test_names_of_others_lead_to_names_that_exist() -> None:
    assert set(suggestions.LOSSES.values()) <= LOSSES.keys()
    assert set(suggestions.ADVANTAGES.values()) <= ADVANTAGES.keys()
    assert set(suggestions.ESTIMATORS.values()) <= set(choices("algorithm.kl.estimator"))
    for ours in suggestions.KEYS.values():
        assert field_at(ours.partition(",")[0]) is not None, ours


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("lr=1", "trainer.learning_rate"),
        ("trainer.optimizer.lr=1", "trainer.learning_rate"),
        ("rollout.n=8", "rollout.group_size"),
        ("eval.n=8", "eval.samples"),
        ("agent.max_response_length=8", "rollout.max_tokens"),
        ("critic.lr=1", "critic.learning_rate"),
        ("critic.optim.lr=1", "critic.learning_rate"),
        ("warm_start.lr=1", "warm_start.learning_rate"),
        ("finetune.lr=1", "finetune.learning_rate"),
        ("trainer.tensor_model_parallel_size=2", "trainer.tensor_parallel"),
        ("tensor_model_parallel_size=2", "rollout.tensor_parallel"),
        ("total_epochs=2", "trainer.steps"),
        ("actor_rollout_ref.rollout.n=8", "config from-verl"),
    ],
)
def test_keys_of_others_are_told_what_they_are_here(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"[ `]{hint}(?![\w.])"):
        load_config("calculator", [argument])


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        ("algorithm.loss=vanilla", "ppo"),
        ("algorithm.loss=geo_mean", "gmpo"),
        ("algorithm.loss=bypass_mode", "bypass_ppo_clip"),
        ("algorithm.advantage=grpo_vectorized", "grpo"),
        ("algorithm.correction=bypass_mode", "bypass_ppo_clip"),
        ("algorithm.kl.estimator=low_var_kl", "k3"),
        ("trainer.backend=fsdp", "fsdp2"),
    ],
)
def test_a_name_of_another_project_gets_a_hint(argument: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf" is .*\b{ours}\b.* here") as error:
        load_config(None, ["model.path=m", "data.path=d", argument])
    assert argument.partition("=")[0] in str(error.value)
