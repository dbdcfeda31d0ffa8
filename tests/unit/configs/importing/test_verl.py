"""A verl config becomes ours: what was given, what verl does by default, and every key that has no place here."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_async.configs.importing import verl
from rl_async.configs.load import load_config
from rl_async.configs.schema.data import OverrideConfig, RopeConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError

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


def translated(tmp_path: Path, *more: str) -> tuple[RunConfig, str]:
    """Our config for SCRIPT and further arguments, loaded, and the comments above it."""
    script, ours = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(SCRIPT)
    text = verl.write(script, list(more))
    ours.write_text(text)
    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return load_config(str(ours)), comments


def test_what_a_script_gives_is_what_ours_says(tmp_path: Path) -> None:
    config, _ = translated(tmp_path)
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
    config, comments = translated(tmp_path)
    assert config.algorithm.clip_high == 0.2 and config.algorithm.loss_options.clip_dual == 3.0
    assert config.algorithm.correction == "disabled" and "kl_cov_coef" not in comments
    config, told = translated(tmp_path, "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov")
    assert config.algorithm.loss_options.kl_cov_coef == 0.1 and "kl_cov_coef" in told
    assert config.queue.max_staleness == 0 and config.trainer.beta2 == 0.999
    assert config.eval.before and not translated(tmp_path, "trainer.val_before_train=false")[0].eval.before
    assert not translated(tmp_path, "data.val_files=null")[0].eval.before, "there is nothing to evaluate"
    for key in ("clip_high", "clip_dual", "correction", "max_staleness", "beta2", "epsilon", "before"):
        assert key in comments


def test_an_interaction_is_an_environment(tmp_path: Path) -> None:
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    given = (f"{multi_turn}.enable=true", f"{multi_turn}.interaction_config_path=/c/interaction.yaml")
    config, comments = translated(tmp_path, *given)
    assert (config.agent.loop, config.agent.environment) == ("tool_agent", "verl:/c/interaction.yaml")
    assert "reward.functions" in comments
    config, _ = translated(tmp_path, *given, f"{multi_turn}.tool_config_path=/c/tools.yaml")
    assert config.agent.environment == "verl:/c/tools.yaml,/c/interaction.yaml"


def test_a_micro_batch_is_of_the_whole_rows_that_ranks_share(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    for given, tokens in ((), 2 * 16384), ((f"{ACTOR}ppo_max_token_len_per_gpu=500",), 1000):
        more = [f"{ACTOR}ulysses_sequence_parallel_size=2", *given]
        trainer = yaml.safe_load(verl.write(tmp_path / "run.sh", more))["trainer"]
        assert (trainer["sequence_parallel"], trainer["max_tokens_per_microbatch"]) == (2, tokens)


def test_every_key_without_a_place_is_listed(tmp_path: Path) -> None:
    _, comments = translated(tmp_path, f"{ACTOR}loss_scale_factor=100", "trainer.balance_batch=true")
    for key in ("trainer.of_tomorrow", "elsewhere.entirely", f"{ACTOR}loss_scale_factor", "trainer.balance_batch"):
        assert key in comments


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
    config, _ = translated(tmp_path, *(f"{ALGORITHM}rollout_correction.{argument}" for argument in arguments))
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
    config, _ = translated(tmp_path, *arguments)
    assert {name: getattr(config.algorithm, name) for name in expected} == expected


def test_an_overridden_config_is_the_models(tmp_path: Path) -> None:
    key = "+actor_rollout_ref.model.override_config."
    scaling = [f"{key}rope_scaling.type=yarn", f"{key}rope_scaling.factor=4.0", f"{key}rope_theta=1e6"]
    config, _ = translated(tmp_path, f"{key}attn_implementation=eager", *scaling)
    assert config.model.override == OverrideConfig(
        rope=RopeConfig(rope_theta=1e6, rope_type="yarn", factor=4.0), attention="eager"
    )
    with pytest.raises(ConfigError, match="override"):
        translated(tmp_path, f"{key}rope_scaling.type=longrope", f"{key}rope_scaling.factor=4.0")


def test_primes_reward_model_is_in_the_critics_place(tmp_path: Path) -> None:
    config, comments = translated(tmp_path, *PRIME, "reward_model.model.optim.lr=2e-6", "algorithm.reward_dpo_coef=10")
    assert config.critic is not None and (config.critic.path, config.critic.learning_rate) == ("/models/prm", 2e-6)
    assert config.algorithm.advantage_options.prime_coef == 2.0 and "update" in comments
    assert config.reward.model is None
    with pytest.raises(ConfigError, match="loss_type"):
        translated(tmp_path, *PRIME, "reward_model.model.loss_type=dpo")


def test_a_kl_keeps_its_place_and_verls_adaptive_target(tmp_path: Path) -> None:
    in_loss, _ = translated(tmp_path, f"{ACTOR}use_kl_loss=True")
    assert (in_loss.algorithm.kl.coef, in_loss.algorithm.kl.estimator) == (0.001, "k3")
    arguments = [f"{ALGORITHM}use_kl_in_reward=True", f"{ALGORITHM}kl_ctrl.type=adaptive"]
    in_reward, comments = translated(tmp_path, *arguments)
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
        translated(tmp_path, argument)
    assert argument.partition("=")[0] in str(error.value)


def test_what_the_shell_computes_is_left_out_and_named(tmp_path: Path) -> None:
    config, comments = translated(tmp_path, "data.train_batch_size=$BATCH", "data.max_prompt_length=$((2*3))")
    assert config.data.train_batch_groups == 1024 and "data.train_batch_size = $BATCH" in comments
    assert config.data.max_prompt_tokens == 512 and "data.max_prompt_length = $((2*3))" in comments


def test_a_removed_key_and_another_file_of_defaults_are_named(tmp_path: Path) -> None:
    config, comments = translated(tmp_path, "~data.train_batch_size", "+data.max_prompt_length=9")
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
