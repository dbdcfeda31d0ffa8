"""Configs of TRL, prime-rl and slime become ours; keys that the tables name exist, and so do names in hints."""

import json
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rl_async.configs import suggestions
from rl_async.configs.importing import SOURCES, prime_rl, slime, trl, verl
from rl_async.configs.importing.shell import is_unknown, read_script
from rl_async.configs.importing.translation import Translation, nested
from rl_async.configs.load import choices, field_at, load_config, parse
from rl_async.configs.schema.algorithm import ADVANTAGES, LOSSES
from rl_async.configs.schema.data import CurriculumConfig, OverrideConfig, RopeConfig
from rl_async.configs.schema.rollout import TruncationConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.launcher.cli.__main__ import main
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


# A verl config becomes ours: what was given, what verl does by default, and every key that has no place here.


SCRIPT = """
files=/data/train.parquet
n_samples=8
ray stop
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$files" data.val_files="['/data/test.parquet']" \\
    data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    data.max_prompt_length=100 data.max_response_length=300 \\
    actor_rollout_ref.model.path=/models/m actor_rollout_ref.rollout.n=${n_samples} \\
    actor_rollout_ref.actor.optim.lr=2e-6 trainer.logger='["console","wandb"]' \\
    trainer.total_training_steps=7 +trainer.of_tomorrow=3 elsewhere.entirely=4 $@  # and more
"""
ALGORITHM = "algorithm."
PRIME = [
    *("algorithm.adv_estimator=rloo", "algorithm.reward_gt_coef=5", "reward_model.enable=True"),
    *("reward_model.model.path=/models/prm", "reward_model.model.beta_train=0.05"),
]
ACTOR = "actor_rollout_ref.actor."


def verl_translated(tmp_path: Path, *more: str) -> tuple[RunConfig, str]:
    """Our config for SCRIPT and further arguments, loaded, and the comments above it."""
    script, ours = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(SCRIPT)
    text = verl.write(script, list(more))
    ours.write_text(text)
    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return load_config(str(ours)), comments


def test_what_a_script_gives_is_what_ours_says(tmp_path: Path) -> None:
    config, _ = verl_translated(tmp_path)
    assert (config.model.path, config.data.path, config.data.eval_path) == (
        "/models/m",
        "/data/train.parquet",
        "/data/test.parquet",
    )
    assert (config.data.train_batch_groups, config.trainer.minibatches, config.rollout.group_size) == (512, 4, 8)
    assert (config.rollout.max_tokens, config.agent.max_tokens, config.rollout.max_model_len) == (300, 400, 400)
    assert (config.trainer.learning_rate, config.trainer.steps) == (2e-6, 7)
    assert config.tracking.backends == ("console", "wandb")
    assert (config.algorithm.advantage, config.algorithm.loss) == ("grpo", "ppo")


def test_what_verl_does_by_default_and_we_do_not_is_written_and_named(tmp_path: Path) -> None:
    config, comments = verl_translated(tmp_path)
    assert config.algorithm.clip_high == 0.2 and config.algorithm.loss_options.clip_dual == 3.0
    assert config.algorithm.correction == "disabled" and "kl_cov_coef" not in comments
    config, told = verl_translated(tmp_path, "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov")
    assert config.algorithm.loss_options.kl_cov_coef == 0.1 and "kl_cov_coef" in told
    assert config.queue.max_staleness == 0 and config.trainer.beta2 == 0.999
    assert config.eval.before and not verl_translated(tmp_path, "trainer.val_before_train=false")[0].eval.before
    assert not verl_translated(tmp_path, "data.val_files=null")[0].eval.before, "there is nothing to evaluate"
    for key in ("clip_high", "clip_dual", "correction", "max_staleness", "beta2", "epsilon", "before"):
        assert key in comments


def test_an_interaction_is_an_environment(tmp_path: Path) -> None:
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    given = (f"{multi_turn}.enable=true", f"{multi_turn}.interaction_config_path=/c/interaction.yaml")
    config, comments = verl_translated(tmp_path, *given)
    assert (config.agent.loop, config.agent.environment) == ("tool_agent", "verl:/c/interaction.yaml")
    assert "reward.functions" in comments
    config, _ = verl_translated(tmp_path, *given, f"{multi_turn}.tool_config_path=/c/tools.yaml")
    assert config.agent.environment == "verl:/c/tools.yaml,/c/interaction.yaml"


def test_a_micro_batch_is_of_the_whole_rows_that_ranks_share(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    for given, tokens in ((), 2 * 16384), ((f"{ACTOR}ppo_max_token_len_per_gpu=500",), 1000):
        more = [f"{ACTOR}ulysses_sequence_parallel_size=2", *given]
        trainer = yaml.safe_load(verl.write(tmp_path / "run.sh", more))["trainer"]
        assert (trainer["sequence_parallel"], trainer["max_tokens_per_microbatch"]) == (2, tokens)


def test_every_key_without_a_place_is_listed(tmp_path: Path) -> None:
    _, comments = verl_translated(tmp_path, f"{ACTOR}loss_scale_factor=100", "trainer.balance_batch=true")
    for key in ("trainer.of_tomorrow", "elsewhere.entirely", f"{ACTOR}loss_scale_factor", "trainer.balance_batch"):
        assert key in comments


def test_a_misspelt_key_is_told_its_neighbour(tmp_path: Path) -> None:
    """Also where keys of its section are known to have no counterpart, such as this one's."""
    rollout = "actor_rollout_ref.rollout"
    _, text = verl_translated(tmp_path, f"{rollout}.temprature=0.7", f"{rollout}.top_p=0.9")
    assert f"{rollout}.temprature = 0.7; is {rollout}.temperature meant?" in text
    # A known one is not taken for a slip of another.
    assert text.count("meant?") == 1


@pytest.mark.parametrize(
    ("arguments", "correction", "options"),
    [
        (["rollout_is=token"], "decoupled_token_is", {}),
        (["rollout_is=sequence"], "decoupled_seq_is", {}),
        (["rollout_is=token", "rollout_is_threshold=0.5_5.0"], "decoupled_token_icepop", {}),
        (["rollout_is=sequence", "rollout_rs=seq_sum_k1", "rollout_rs_threshold=0.5_2.0"], "decoupled_seq_is_rs", {}),
        (["rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"], "decoupled_k3_rs", {}),
        (["bypass_mode=true"], "bypass_ppo_clip", {}),
        (["bypass_mode=true", "rollout_is=sequence", "loss_type=reinforce"], "bypass_pg_is", {}),
        (["rollout_is=token", "rollout_is_threshold=3"], "disabled", {"weight": "token", "cap": 3.0}),
        (["rollout_rs=token_k1", "rollout_rs_threshold=0.5_4"], "disabled", {"reject": {"token_k1": "0.25_2"}}),
    ],
)
def test_a_rollout_correction_is_the_preset_that_does_the_same(
    tmp_path: Path, arguments: list[str], correction: str, options: dict[str, Any]
) -> None:
    config, _ = verl_translated(tmp_path, *(f"{ALGORITHM}rollout_correction.{argument}" for argument in arguments))
    assert config.algorithm.correction == correction
    for name, value in options.items():
        assert getattr(config.algorithm.correction_options, name) == value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([f"{ACTOR}policy_loss.loss_mode=geo_mean"], {"loss": "gmpo", "aggregation": "seq-mean-token-mean"}),
        ([f"{ACTOR}policy_loss.loss_mode=gspo", f"{ACTOR}clip_ratio_low=3e-4"], {"loss": "gspo", "clip_low": 3e-4}),
        ([f"{ACTOR}clip_ratio=0.3"], {"clip_low": 0.2, "clip_high": 0.2}),
        (
            [f"{ACTOR}clip_ratio=0.3", f"{ACTOR}clip_ratio_low=null", f"{ACTOR}clip_ratio_high=0.4"],
            {"clip_low": 0.3, "clip_high": 0.4},
        ),
        ([f"{ACTOR}policy_loss.loss_mode=bypass_mode"], {"loss": "ppo", "correction": "bypass_ppo_clip"}),
        (
            [f"{ACTOR}policy_loss.loss_mode=dppo_kl", f"{ACTOR}clip_ratio_high=0.9"],
            {"loss": "dppo_kl", "clip_high": 0.28},
        ),
        ([f"{ALGORITHM}adv_estimator=rloo_vectorized"], {"advantage": "rloo"}),
        ([f"{ALGORITHM}norm_adv_by_std_in_grpo=False"], {"advantage": "dr_grpo"}),
        ([f"{ALGORITHM}adv_estimator=gae"], {"advantage": "gae"}),
        ([*PRIME, "reward_model.model.update=after"], {"advantage": "prime"}),
    ],
)
def test_a_name_of_verls_is_ours(tmp_path: Path, arguments: list[str], expected: dict[str, Any]) -> None:
    config, _ = verl_translated(tmp_path, *arguments)
    assert {name: getattr(config.algorithm, name) for name in expected} == expected


def test_an_overridden_config_is_the_models(tmp_path: Path) -> None:
    key = "+actor_rollout_ref.model.override_config."
    scaling = [f"{key}rope_scaling.type=yarn", f"{key}rope_scaling.factor=4.0", f"{key}rope_theta=1e6"]
    config, _ = verl_translated(tmp_path, f"{key}attn_implementation=eager", *scaling)
    assert config.model.override == OverrideConfig(
        rope=RopeConfig(rope_theta=1e6, rope_type="yarn", factor=4.0), attention="eager"
    )
    with pytest.raises(ConfigError, match="override"):
        verl_translated(tmp_path, f"{key}rope_scaling.type=longrope", f"{key}rope_scaling.factor=4.0")


def test_primes_reward_model_is_in_the_critics_place(tmp_path: Path) -> None:
    config, comments = verl_translated(
        tmp_path, *PRIME, "reward_model.model.optim.lr=2e-6", "algorithm.reward_dpo_coef=10"
    )
    assert config.critic is not None and (config.critic.path, config.critic.learning_rate) == ("/models/prm", 2e-6)
    assert config.algorithm.advantage_options.prime_coef == 2.0 and "update" in comments
    assert config.reward.model is None
    with pytest.raises(ConfigError, match="loss_type"):
        verl_translated(tmp_path, *PRIME, "reward_model.model.loss_type=dpo")


def test_a_kl_keeps_its_place_and_verls_adaptive_target(tmp_path: Path) -> None:
    in_loss, _ = verl_translated(tmp_path, f"{ACTOR}use_kl_loss=True")
    assert (in_loss.algorithm.kl.coef, in_loss.algorithm.kl.estimator) == (0.001, "k3")
    arguments = [f"{ALGORITHM}use_kl_in_reward=True", f"{ALGORITHM}kl_ctrl.type=adaptive"]
    in_reward, comments = verl_translated(tmp_path, *arguments)
    kl = in_reward.algorithm.kl
    assert (kl.place, kl.estimator) == ("reward", "k1") and kl.adaptive is not None and kl.adaptive.target == 0.1
    assert "algorithm.kl.adaptive.target" in comments


@pytest.mark.parametrize(
    "argument",
    [
        "data.train_batch_size=many",
        "algorithm.rollout_correction.rollout_is=row",
        "actor_rollout_ref.rollout.n=[1",
        "actor_rollout_ref.rollout.n",
        "--config-name",
    ],
)
def test_a_value_that_verl_would_not_take_is_named(tmp_path: Path, argument: str) -> None:
    with pytest.raises(ConfigError) as error:
        verl_translated(tmp_path, argument)
    assert argument.partition("=")[0] in str(error.value)


def test_what_the_shell_computes_is_left_out_and_named(tmp_path: Path) -> None:
    config, comments = verl_translated(tmp_path, "data.train_batch_size=$BATCH", "data.max_prompt_length=$((2*3))")
    assert config.data.train_batch_groups == 1024 and "data.train_batch_size = $BATCH" in comments
    assert config.data.max_prompt_tokens == 512 and "data.max_prompt_length = $((2*3))" in comments


def test_a_removed_key_and_another_file_of_defaults_are_named(tmp_path: Path) -> None:
    config, comments = verl_translated(tmp_path, "~data.train_batch_size", "+data.max_prompt_length=9")
    assert (config.data.train_batch_groups, config.data.max_prompt_tokens) == (1024, 9)
    assert "~data.train_batch_size = removed" in comments
    script = tmp_path / "megatron.sh"
    script.write_text(SCRIPT.replace("main_ppo", "main_ppo --config-name='ppo_megatron_trainer.yaml'"))
    text = verl.write(script, [])
    assert "ppo_megatron_trainer" in text and yaml.safe_load(text)["trainer"]["backend"] == "megatron"


def test_references_of_a_whole_config_are_followed(tmp_path: Path) -> None:
    given = {
        "data": {"max_response_length": 99, "train_files": "t.parquet"},
        "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"clip_ratio_high": "${data.other}"}},
        "critic": {"ppo_epochs": "${oc.select:actor_rollout_ref.actor.ppo_epochs,3}"},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.dump(given))
    text = verl.write(file, [])
    assert "critic.ppo_epochs = 3" in text
    assert "actor_rollout_ref.actor.clip_ratio_high = ${data.other}" in text


def test_a_reward_is_to_be_filled_in_where_the_data_is_unknown(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    text = verl.write(script, ["data.train_files=null"])
    assert yaml.safe_load(text)["reward"]["functions"] == [{"name": "FILL_IN.py:compute_score"}]
    assert "data_source" in text


HASHES = "regex:#### (-?[0-9.,]+)"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["openai/gsm8k"], {"name": "math", "extract": [HASHES]}),
        (["lighteval/MATH"], {"name": "math", "extract": ["boxed"]}),
        (["lighteval/MATH", "openai/gsm8k"], {"name": "math", "extract": [[HASHES, "boxed"]]}),
        (["codecontests", "openai/gsm8k"], {"name": "FILL_IN.py:compute_score"}),
        ([None], {"name": "FILL_IN.py:compute_score"}),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_reward_is_chosen_by_the_datas_own_column(
    tmp_path: Path, sources: list[str | None], expected: dict[str, Any], suffix: str
) -> None:
    script, data = tmp_path / "run.sh", tmp_path / f"train.{suffix}"
    script.write_text(SCRIPT)
    rows = [{"data_source": source, "n": n} for n, source in enumerate([*sources, *sources])]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    else:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = verl.write(script, [f"data.train_files={data}"])
    assert yaml.safe_load(text)["reward"]["functions"] == [expected]


def test_a_reward_function_whose_file_is_not_here_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script, given = tmp_path / "run.sh", "custom_reward_function.path=verlrew.py"
    script.write_text(SCRIPT)
    assert "there is no file verlrew.py" in " ".join(verl.write(script, [given]).replace("\n#", " ").split())
    Path("verlrew.py").write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    assert "there is no file" not in verl.write(script, [given])


# Configs of projects that no importer reads are refused, with the kinds that can be read.


FOREIGN = {
    "areal.yaml": r"""experiment_name: gsm8k-grpo
trial_name: trial0
allocation_mode: sglang:d4p1t1+d4p1t1
rollout:
  max_concurrent_rollouts: 256
  max_head_offpolicyness: 2
gconfig:
  n_samples: 4
  max_new_tokens: 1024
actor:
  path: Qwen/Qwen2-1.5B-Instruct
  optimizer:
    type: adam
    lr: 1.7e-5
  group_size: 4
  eps_clip: 0.4
  kl_ctl: 0.0
train_dataset:
  batch_size: 256
  path: openai/gsm8k
""",
    "skyrl.sh": r"""uv run -m skyrl_train.entrypoints.main_base \
    data.train_data="['gsm8k/train.parquet']" \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
    trainer.placement.colocate_all=true \
    trainer.strategy=fsdp2 \
    generator.num_inference_engines=4 \
    generator.backend=vllm \
    generator.n_samples_per_prompt=5 \
    trainer.epochs=20 \
    trainer.train_batch_size=1024 \
    environment.env_class=gsm8k
""",
    "openrlhf.sh": r"""python3 -m openrlhf.cli.train_ppo_ray \
    --ref_num_nodes 1 \
    --actor_num_gpus_per_node 8 \
    --vllm_num_engines 4 \
    --colocate_all_models \
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
    --remote_rm_url http://localhost:5000 \
    --micro_train_batch_size 8 \
    --train_batch_size 128 \
    --rollout_batch_size 1024 \
    --n_samples_per_prompt 8 \
    --max_epochs 1 \
    --prompt_max_len 1024 \
    --generate_max_len 1024 \
    --zero_stage 3 \
    --bf16 \
    --actor_learning_rate 5e-7 \
    --init_kl_coef 1e-3 \
    --prompt_data OpenRLHF/prompt-collection-v0.1 \
    --input_key context_messages \
    --advantage_estimator reinforce_baseline
""",
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_config_of_another_project_is_refused_with_the_kinds_that_can_be_read(
    name: str, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(FOREIGN[name])

    with pytest.raises(ConfigError) as caught:
        SOURCES[kind](file, [])

    assert str(file) in str(caught.value) and all(f"from-{other}" in str(caught.value) for other in SOURCES)


# Scripts are worked out as a shell would, but for what only a running machine knows, which stays marked.


def words(script: str) -> list[str]:
    """The words of the command `show` in a script."""
    (found,) = [command for command in read_script(script, "run.sh").commands if command[0] == "show"]
    return found[1:]


# Without anything that a machine decides, so that bash itself is the oracle.
SCRIPTS = {
    "variables": 'A=1; B="x $A y"; show $A "$B" $B ${A}b \'$A\' "a"\'b\'c',
    "defaults": 'E=; show ${A:-1} ${E:-2} "${E-3}" ${F:=4} $F ${A:+no}${F:+yes} ${A-"q r"}',
    "nested defaults": 'D=${D:-"${ROOT:-/r}/d"}; show ${D} "${X:-${Y:-$D}}"',
    "arrays": 'A=(a "b c" # none\n  --d e\n); A+=(f); N=(); show "${A[@]}" ${A[@]} "${N[@]}" ${N[@]} x"${A[0]}"',
    "length of an array": 'A=(a "b c"); show ${#A[@]}',
    "words of a variable": 'M=" a  b\nc "; show x${M}y $M "$M"',
    "arithmetic": "A=3; B=$((A * 2 + 1)); show $((B / 2)) $(( (A + 5) % 3 )) $((-7 / 2)) $((A > 2))",
    "trimming": "A=/m/Qwen3-8B.tar; show ${A##*/} ${A%.*} ${A#/} ${A/8B/4B} ${A%%-*}",
    "case": "D=gpu; case $D in cpu) N=1 ;; gpu | tpu) N=8 ;; *) N=9 ;; esac; show $N",
    "if": 'if [ "$A" = 1 ]; then B=1; elif [[ -z $A && x == x* ]]; then B=2; else B=3; fi; show $B',
    "nested if": "A=2; if [ $A -gt 1 ]; then if ! [ $A -eq 3 ]; then B=in; fi; else B=out; fi; show $B",
    "and, or": 'A=1; [ $A = 1 ] && B=y || B=n; [ $A = 2 ] && C=y || C=n; [ -n "$Z" ] || D=d; show $B $C $D',
    "for": "L=; for n in 1 2 3; do L+=$n; done; show $L",
    "export": 'export A=1 B="2 3"; show $A "$B"',
    "continuation": "show a \\\n  b \\\n  c",
    "quotes over lines": 'J="{\n \\"a\\": 1 }"; show "$J" b',
    "comments": "show a#b # c",
    "redirections": "show a 2>/dev/null b >/dev/null",
    "here-document": "true <<EOF\nshow not this\nEOF\nshow this",
    "functions": "f() {\n  A=2\n}\nA=1\nshow $A",
    "groups": "A=1; if [ $A = 1 ] && { [ $A = 2 ] || [ $A = 1 ]; }; then B=g; fi; show $B",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_worked_out_as_bash_does(name: str) -> None:
    bash = shutil.which("bash")
    assert bash, "the oracle of this test"
    printing = "show() { printf '%s\\0' \"$@\" >&3; }\nexec 3>&1\n"
    ran = subprocess.run([bash, "-c", printing + SCRIPTS[name]], capture_output=True, text=True, env={}, check=True)
    assert words(SCRIPTS[name]) == ran.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("show $HOME/d ${HOME}/d $(nproc) `id`", ["$HOME/d", "${HOME}/d", "$(nproc)", "`id`"]),
        ("show $KEY ${KEY}", ["$KEY", "${KEY}"]),
        ('show a "$@" ${MORE[@]} $*', ["a"]),
        ("D=${D:-$(python3 -c 'import npu' && echo npu || echo gpu)}; show $D", ["gpu"]),
        ("N=$(nproc); N=${N:-4}; if [ -z $N ] || [ $N -le 0 ]; then N=8; fi; show $N", ["8"]),
        ("if command -v x; then N=$(x); else N=0; fi; show $N", ["0"]),
        ('if [ -z "$KEY" ]; then echo "set KEY"; exit 1; fi; show a', ["a"]),
        ("show a\n  --b 1\n", ["a", "--b", "1"]),
        ("show a \\\n # why \n data.x=1\n", ["a", "data.x=1"]),
        ("echo engine=trt is for show only; show a", ["a"]),
        ("if grep x y; then show a; fi", ["a"]),
    ],
)
def test_what_only_a_machine_knows_stays_or_is_assumed(script: str, expected: list[str]) -> None:
    assert words(script) == expected
    assert all(is_unknown(word) == ("$" in word or "`" in word) for word in expected)


def test_what_is_assumed_is_said() -> None:
    assert read_script("N=$(nproc); if [ $N -gt 1 ]; then M=2; fi", "s").assumed
    assert not read_script("N=3; if [ $N -gt 1 ]; then M=2; fi", "s").assumed


@pytest.mark.parametrize(
    "script",
    [
        "A=xxxxxxxx\n" + "A=$A$A$A$A\n" * 60 + "show $A",
        "A=(x x x x)\n" + 'A+=("${A[@]}" "${A[@]}" "${A[@]}")\n' * 60 + 'show "${A[@]}"',
        "A=" + "x" * 60_000 + "\n" + "B=$A\n" * 200 + "show",
    ],
)
def test_a_script_that_grows_without_bounds_is_refused(script: str) -> None:
    with pytest.raises(ConfigError):
        read_script(script, "run.sh")


@pytest.mark.parametrize(
    "script", ["if", "case", "case x in", "for", "((", '"', "'", "$(", "${", "fi fi", ")", "A=(", "<<E", "[["]
)
def test_what_is_cut_off_ends(script: str) -> None:
    assert read_script(f"show a\n{script}", "run.sh").commands[0] == ["show", "a"]


# Files from elsewhere: what is printed for them holds their values and nothing else, and hostile ones are refused.


ODD = [
    "\n",
    "\r",
    "\t",
    "\x00",
    "\x0b",
    "\x0c",
    "\x1b",
    "\x1c",
    "\x85",
    "\u2028",
    "\u2029",
    "\ufeff",
    "\u202e",
    "\ud800",
]
WORDS = [
    "#",
    ": ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "&a",
    "*a",
    "!x",
    "|",
    ">",
    '"',
    "'",
    "%",
    "@",
    "`",
    "\\",
    "~",
    "=",
    "<<",
    "  ",
]
LIKE_VALUES = ["null", "yes", "0_5", "1e-3", "1:30", "0x1F", "2026-01-01", ".nan", ".inf", "-1", "1.0", "---", "..."]
LINE = "reward: {functions: [{name: 'evil.py:f'}]}"
KEYS = {
    "trl": ["model_name_or_path", "dataset_name", "lr_scheduler_type", "loss_type", "output_dir", "reward_weights"],
    "verl": ["actor_rollout_ref.model.path", "data.train_files", "trainer.project_name", "trainer.experiment_name"],
    "prime-rl": ["model.name", "wandb.project", "orchestrator.renderer", "trainer.loss.type"],
    "slime": ["hf-checkpoint", "prompt-data", "wandb-project", "rm-type", "kl-loss-type"],
}


def text(rng: random.Random) -> str:
    parts = [
        rng.choice([*ODD, *WORDS, *LIKE_VALUES, LINE, "é", "漢", "\U0001f600", "a", "b c"])
        for _ in range(rng.randint(0, 6))
    ]
    return "".join(parts)


def value(rng: random.Random, depth: int = 0) -> Any:
    made = rng.randrange(9 if depth < 2 else 7)
    if made < 4:
        return text(rng)
    if made == 4:
        return rng.choice([True, False, None])
    if made == 5:
        return rng.choice([0, -7, 10**25, 1 << 70])
    if made == 6:
        return rng.choice([0.1, -1e300, 5e-324, float("inf")])
    if made == 7:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {text(rng): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def script(given: dict[str, Any]) -> str:
    """Write flags; a script's words have no line breaks, and a file no surrogates."""
    rest = re.sub("[\n\r\x00\ud800-\udfff]", "", "".join(map(str, given.values())))
    flags = {key: json.dumps(value) for key, value in given.items() if re.fullmatch("[a-z-]+", key)}
    return "train.py " + " ".join(
        f"--{key} {shlex.quote(text)}" for key, text in (flags | {"save": json.dumps(rest, ensure_ascii=False)}).items()
    )


@pytest.fixture
def translations(monkeypatch: pytest.MonkeyPatch) -> list[Translation]:
    """What is translated from now on, as it is when it is printed."""
    seen: list[Translation] = []
    real = Translation.text

    def kept(self: Translation, *arguments: Any) -> str:
        seen.append(self)
        return real(self, *arguments)

    monkeypatch.setattr(Translation, "text", kept)
    return seen


def round_trip(source: str, rng: random.Random, folder: Path, translations: list[Translation]) -> bool:
    """Whether a file of random values was translated; what is printed then parses to what was translated."""
    given = {key: value(rng) for key in rng.sample(KEYS[source], 3)} | {text(rng): value(rng) for _ in range(3)}
    file = folder / ("run.sh" if source == "slime" else "given.json")
    file.write_text(script(given) if source == "slime" else json.dumps(given))
    try:
        printed = SOURCES[source](file, [])
    except ConfigError:
        return False
    assert parse(printed, "printed") == nested(translations.pop().ours)
    return True


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_printed_holds_the_translated_values_and_nothing_else(
    source: str, tmp_path: Path, translations: list[Translation]
) -> None:
    rng = random.Random(random.random())
    assert sum(round_trip(source, rng, tmp_path, translations) for _ in range(60)) > 6


DEEP = "[" * 5000 + "]" * 5000
QUOTED = ".".join(['"a b"'] * 50_000)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.yaml", f"learning_rate: {DEEP}"),
        ("deep.json", f'{{"learning_rate": {DEEP}}}'),
        ("deep.toml", f"learning_rate = {DEEP}"),
        ("deep_key.toml", f"{'.'.join(['a'] * 50_000)} = 1"),
        ("deep_quoted_key.toml", f"[{QUOTED}]"),
        ("bomb.yaml", f"{BOMB}learning_rate: *a9"),
        ("merges.yaml", f"{MERGES}learning_rate: 1"),
        ("itself.yaml", "learning_rate: &a [*a]"),
        ("itself.yaml", "learning_rate: &a {b: *a}"),
        ("itself.yaml", "learning_rate: &a {<<: *a}"),
        ("long.yaml", "learning_rate: 1\n" * 100_000),
        ("variables.txt", "A=xxxxxxxx\n" + "A=$A$A$A$A\n" * 60 + "learning.rate=$A"),
        ("defaults.txt", "A=" + "${A:-" * 25_000 + "}" * 25_000),
        ("condition.txt", f"if [ {'a -a ' * 25_000}a ]; then\ntrain.py\nfi"),
        ("immense.txt", "A=b\n" * 100_000),
        ("binary.txt", "\x00\x01" * 100),
        ("notes.txt", "Nothing that any trainer knows."),
        ("empty.yaml", "{}"),
        ("another.yaml", "foo: 1\nbar: {baz: 2}"),
        ("script.py", "print('no config')"),
        ("broken.py", "GRPOConfig(("),
        ("deep.py", f"GRPOConfig(learning_rate={'-' * 20_000}1)"),
    ],
)
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_no_config_of_the_project_is_refused_at_once(
    source: str, name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["config", f"from-{source}", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("content", [BOMB, MERGES, f"a: {DEEP}", "a: &a [*a]", "a: &a {<<: *a}"])
def test_our_own_configs_are_bounded_alike(content: str) -> None:
    with pytest.raises(ConfigError):
        parse(content, "c.yaml")


def test_values_of_other_kinds_are_refused_naming_the_file(tmp_path: Path) -> None:
    for given in ({"num_generations": 0}, {"max_tool_calling_iterations": "x"}, {"epsilon": [1], "loss_type": "cispo"}):
        (tmp_path / "c.json").write_text(json.dumps(given))
        with pytest.raises(ConfigError):
            SOURCES["trl"](tmp_path / "c.json", [])


def test_what_no_config_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("model_name_or_path = 07:32:00")
    with pytest.raises(ConfigError, match="time"):
        SOURCES["trl"](tmp_path / "c.toml", [])


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_without_end_is_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"c\.yaml: more than"):
        SOURCES[source](tmp_path / "c.yaml", [])


PROGRAM = """
from trl import GRPOConfig, ModelConfig
import trl
STEPS = 7
LATER = 1
LATER = 2
args = trl.GRPOConfig(max_completion_length=1024, learning_rate=3e-6, max_steps=STEPS, num_generations=LATER,
                      beta=float("0.1"), **more)
model = ModelConfig(model_name_or_path="m")
"""


def test_a_python_program_is_read_by_its_literals(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    printed = SOURCES["trl"](tmp_path / "train.py", [])
    values = parse(printed, "printed")
    assert (values["rollout"]["max_tokens"], values["trainer"]["learning_rate"]) == (1024, 3e-6)
    assert (values["trainer"]["steps"], values["model"]["path"]) == (7, "m")
    for left in ("num_generations = LATER", "beta = float", "** = more"):
        assert left in printed


def test_flags_in_a_script_of_trls_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("accelerate launch grpo.py --max_completion_length 77 --learning-rate 1e-6\n")
    values = parse(SOURCES["trl"](tmp_path / "run.sh", []), "printed")
    assert values["rollout"]["max_tokens"] == 77


# Truncated samplers of other projects become `rollout.truncation`, or are refused where it cannot hold them.


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


def translated_truncation(folder: Path, source: str, top_k: int, top_p: float, engine: str = "vllm") -> str:
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
    written = translated_truncation(tmp_path, source, top_k, top_p)
    (tmp_path / "ours.yaml").write_text(written)
    given = ["data.path=t.parquet", "model.path=m"]
    assert load_config(str(tmp_path / "ours.yaml"), given).rollout.truncation == expected
    # The approximation, where one is made, is told.
    assert ("rollout.truncation.top_k: " in written) == (top_k <= 0 and top_p < 1)


@pytest.mark.parametrize("source", FILES)
@pytest.mark.parametrize("top_k", [1, 17, -2])
def test_a_number_of_tokens_that_engines_cannot_name_is_an_error(tmp_path: Path, source: str, top_k: int) -> None:
    with pytest.raises(ConfigError, match=f"top_k={top_k}"):
        translated_truncation(tmp_path, source, top_k, 1.0)


def test_an_engine_that_does_not_name_kept_tokens_is_named(tmp_path: Path) -> None:
    written = translated_truncation(tmp_path, "verl", 5, 0.9, "sglang")
    assert parse(written, "written")["rollout"]["truncation"] == {"top_k": 5, "top_p": 0.9}
    assert "rollout.engine=sglang" in written.partition("Refused as it stands")[2]
