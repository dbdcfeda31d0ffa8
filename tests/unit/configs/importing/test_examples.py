"""Files in the forms of the projects' own examples become what they mean, or are refused for what is missing here."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.importing import SOURCES
from rl_async.configs.importing.translation import flatten, our_default
from rl_async.configs.load import load_config, parse, refusals
from rl_async.errors import ConfigError


def ours(tmp_path: Path, source: str, name: str, text: str, *more: str) -> dict[str, Any]:
    """Our dotted keys for a file; it loads once paths are filled in."""
    (tmp_path / name).write_text(text)
    written = SOURCES[source](tmp_path / name, list(more))
    (tmp_path / "ours.yaml").write_text(written)
    load_config(str(tmp_path / "ours.yaml"), ["model.path=m", "data.path=t.parquet"])
    return flatten(parse(written, "written"))


def comments(tmp_path: Path, source: str, name: str, text: str, *more: str) -> str:
    (tmp_path / name).write_text(text)
    return "\n".join(line for line in SOURCES[source](tmp_path / name, list(more)).splitlines() if line[:1] == "#")


VERL = r"""
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import npu' && echo npu || echo gpu)}
ENGINE=${ENGINE:-vllm}
TP=${TP:-}
n_prompt=1024
n_answer=$((1024 * 8))
case "${DEVICE}" in
    gpu) TP=${TP:-2}; GPUS=8 ;;
    npu) TP=4; GPUS=16; n_prompt=2048 ;;
    *) echo "rollout.name=trt is for gpu"; exit 1 ;;
esac
if [ "${ENGINE}" = trt ]; then
    echo "actor_rollout_ref.rollout.name=trt needs a GPU" >&2
fi
DATA=(
    data.train_files="['$HOME/gsm8k/train.parquet']"  # one
    data.val_files="['$HOME/gsm8k/test.parquet', '$HOME/math/test.parquet']"
    data.train_batch_size=64
    data.max_prompt_length=${n_prompt} data.max_response_length=${n_answer}
)
ALGORITHM="
    algorithm.adv_estimator=grpo
    actor_rollout_ref.actor.clip_ratio_low=10 \
    actor_rollout_ref.actor.policy_loss.loss_mode=cispo"
EXTRA=()
if [ "${DEVICE}" = npu ]; then EXTRA+=(trainer.device=npu); fi
python3 -m verl.trainer.main_ppo "${DATA[@]}" $ALGORITHM "${EXTRA[@]}" \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.name=${ENGINE} actor_rollout_ref.rollout.tensor_model_parallel_size=${TP} \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.val_kwargs.n=4 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    trainer.nnodes=${NODES:-2} trainer.n_gpus_per_node=$GPUS trainer.total_epochs=3 "$@" 2>&1 | tee log
"""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_a_script_of_verls(tmp_path: Path) -> None:
    found = ours(tmp_path, "verl", "run.sh", VERL)
    assert (found["mode"], found["trainer.ranks"], found["rollout.engines"]) == ("colocated", 16, 8)
    assert (found["rollout.engine"], found["rollout.tensor_parallel"]) == ("vllm", 2)
    lengths = ("data.max_prompt_tokens", "rollout.max_tokens", "agent.max_tokens", "rollout.max_model_len")
    assert [found[key] for key in lengths] == [1024, 8192, 9216, 9216]
    assert (found["algorithm.clip_low"], found["algorithm.loss"]) == (1.0, "cispo")
    assert (found["eval.samples"], found["eval.temperature"], len(found["data.eval_path"])) == (4, 0.6, 2)
    assert found["data.path"] == "$HOME/gsm8k/train.parquet" and found["eval.tasks"] > 1000
    said = comments(tmp_path, "verl", "run.sh", VERL)
    assert "To fill in" in said and "$HOME/gsm8k" in said and "total_epochs=3" in said


@pytest.mark.parametrize(("mode", "temperature"), [("async", 0.6), ("sync", 0)])
def test_verls_evaluations_sample_by_their_temperature(tmp_path: Path, mode: str, temperature: float) -> None:
    given = [f"{ROLLOUT}.val_kwargs.do_sample=False", f"{ROLLOUT}.mode={mode}"]
    assert ours(tmp_path, "verl", "run.sh", VERL, *given)["eval.temperature"] == temperature


def test_values_that_the_script_does_not_hold_are_to_be_filled_in_where_they_are_read(tmp_path: Path) -> None:
    said = comments(tmp_path, "verl", "run.sh", VERL.replace("${NODES:-2}", "${NODES} trainer.experiment_name=$(date)"))
    filled, _, rest = said.partition("What to look at:")
    assert "trainer.nnodes = " in filled and "trainer.experiment_name = " in rest
    assert "trainer.nnodes = " not in rest


def test_a_run_of_verls_sft_is_no_reinforcement_learning(tmp_path: Path) -> None:
    (tmp_path / "sft.sh").write_text("torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet optim.lr=1e-4\n")
    with pytest.raises(ConfigError, match=r"SFT.*optim\.lr"):
        SOURCES["verl"](tmp_path / "sft.sh", [])


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        # The scheduler steps once in two mini-batches and two epochs.
        (["optim.lr_warmup_steps=10", "ppo_epochs=2"], "trainer.warmup_steps", 10 * 2 * 2),
        (["optim.lr_warmup_steps_ratio=0.25"], "trainer.warmup_steps", 20 * 2),
        (["optim.warmup_style=cosine"], "trainer.schedule", "cosine"),
    ],
)
def test_schedules_of_verls(tmp_path: Path, given: list[str], key: str, value: Any) -> None:
    more = [f"{ACTOR}.{each}" for each in given]
    assert ours(tmp_path, "verl", "run.sh", VERL, "trainer.total_training_steps=80", *more)[key] == value


def test_warm_up_of_verls_critic_and_of_a_run_of_unknown_length(tmp_path: Path) -> None:
    gae = ["algorithm.adv_estimator=gae", "critic.optim.lr_warmup_steps=3"]
    assert ours(tmp_path, "verl", "run.sh", VERL, *gae)["critic.lr_warmup_steps"] == 3 * 2
    ratio = f"{ACTOR}.optim.lr_warmup_steps_ratio=0.25"
    assert "trainer.warmup_steps: " in comments(tmp_path, "verl", "run.sh", VERL, ratio).partition("What to look")[0]


def test_an_engine_of_verls_has_two_gpus_unless_told_otherwise(tmp_path: Path) -> None:
    alone = VERL.replace("actor_rollout_ref.rollout.tensor_model_parallel_size=${TP}", "")
    found = ours(tmp_path, "verl", "run.sh", alone)
    assert (found["rollout.tensor_parallel"], found["rollout.engines"]) == (2, 8)


def test_verls_passes_over_data_that_is_here_are_steps(tmp_path: Path) -> None:
    for name, rows in (("a.jsonl", 130), ("b.jsonl", 70)):
        (tmp_path / name).write_text("{}\n" * rows)
    files = json.dumps([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")])
    found = ours(tmp_path, "verl", "run.sh", VERL, f"data.train_files={files}")
    assert found["trainer.steps"] == 3 * (200 // 64)
    assert [source["weight"] for source in found["data.path"]] == [130, 70]


def test_the_trainers_of_verl_have_sizes_of_their_own(tmp_path: Path) -> None:
    megatron = [f"{ACTOR}.megatron.{key}_model_parallel_size=2" for key in ("tensor", "pipeline")]
    found = ours(tmp_path, "verl", "run.sh", VERL, f"{ACTOR}.strategy=megatron", *megatron)
    sizes = [found[f"trainer.{key}"] for key in ("backend", "tensor_parallel", "pipeline_parallel")]
    assert sizes == ["megatron", 2, 2] and not found["trainer.activation_checkpointing"]
    veomni = [f"{ACTOR}.strategy=veomni", f"{ACTOR}.veomni.ulysses_parallel_size=4"]
    assert ours(tmp_path, "verl", "run.sh", VERL, *veomni)["trainer.sequence_parallel"] == 4
    grouped = ours(tmp_path, "verl", "run.sh", VERL.replace("main_ppo", "main_ppo model_engine=megatron"))
    assert grouped["trainer.backend"] == "megatron"
    dealt = ours(tmp_path, "verl", "run.sh", VERL, f"{ROLLOUT}.expert_parallel_size=16")
    assert dealt["rollout.expert_parallel"] == 2


def test_engines_share_the_trainers_devices_unless_it_is_separate(tmp_path: Path) -> None:
    found = ours(tmp_path, "verl", "run.sh", VERL, f"{ROLLOUT}.name=sglang")
    assert (found["mode"], found["rollout.engines"]) == ("colocated", 8)
    apart = [f"{ROLLOUT}.nnodes=1", "trainer.v1.trainer_mode=separate_async"]
    found = ours(tmp_path, "verl", "run.sh", VERL, *apart)
    assert "mode" not in found and (found["trainer.ranks"], found["rollout.engines"]) == (16, 4)


DISTIL = "distillation.distillation_loss"
TEACHER = ["distillation.enabled=true", "distillation.teacher_models.one.model_path=org/Large"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["loss_mode=k1", "use_policy_gradient=true"], {"divergence": "sampled", "rewards": True, "coef": None}),
        (
            ["loss_mode=k1", "use_policy_gradient=true", "distillation_loss_coef=0.3"],
            {"divergence": "sampled", "rewards": True, "coef": 0.3},
        ),
        (
            # verl reads its weight only beside rewards.
            ["loss_mode=forward_kl_topk", "use_task_rewards=false", "distillation_loss_coef=0.3"],
            {"divergence": "forward", "rewards": False, "coef": None, "top_k": 128},
        ),
    ],
)
def test_a_teacher_of_verls(tmp_path: Path, given: list[str], expected: dict[str, Any]) -> None:
    found = ours(tmp_path, "verl", "run.sh", VERL, *TEACHER, *(f"{DISTIL}.{each}" for each in given))
    assert found["algorithm.teacher.path"] == "org/Large"
    assert {key: found.get(f"algorithm.teacher.{key}") for key in expected} == expected


def test_verls_teachers_of_several_data_sources(tmp_path: Path) -> None:
    models = "+distillation.teacher_models"
    given = [f"{models}.a.key=openai/gsm8k", f"{models}.a.model_path=org/Math", f"{models}.b.model_path=org/Code"]
    given.append(f"{DISTIL}.use_policy_gradient=true")
    found = ours(tmp_path, "verl", "run.sh", VERL, *TEACHER[:1], *given, f"{DISTIL}.loss_mode=k1")
    assert found["algorithm.teacher.by_source.openai/gsm8k.path"] == "org/Math"
    assert found["algorithm.teacher.by_source.b.path"] == "org/Code"
    with pytest.raises(ConfigError, match=r"distillation\.teacher_models"):
        SOURCES["verl"](tmp_path / "run.sh", [*TEACHER[:1], *given, "distillation.teacher_key=ability"])


def test_a_teacher_of_slimes_is_added_to_the_rewards(tmp_path: Path) -> None:
    given = ["use-opd=true", "opd-type=megatron", "opd-teacher-load=/large", "opd-kl-coef=0.5"]
    found = ours(tmp_path, "slime", "run.sh", SLIME, *given)
    keys = ("path", "coef", "rewards", "divergence")
    assert [found.get(f"algorithm.teacher.{key}") for key in keys] == ["/large", 0.5, True, None]


@pytest.mark.parametrize("section", ["reward_model", "reward_model.reward_kwargs", "reward.reward_kwargs"])
def test_verls_overlong_penalty_is_found_wherever_it_was(tmp_path: Path, section: str) -> None:
    buffer = f"{section}.overlong_buffer_cfg" if "kwargs" in section else f"{section}.overlong_buffer"
    found = ours(tmp_path, "verl", "run.sh", VERL, f"{buffer}.enable=true", f"{buffer}.len=512")
    assert found["algorithm.shaping.overlong.cache_tokens"] == 512


def test_a_script_with_images_is_translated(tmp_path: Path) -> None:
    images = ["data.image_key=images", "data.train_files=/data/geo3k/train.parquet"]
    found = ours(tmp_path, "verl", "run.sh", VERL, *images, f"{ACTOR}.freeze_vision_tower=true")
    assert found["data.path"] == "/data/geo3k/train.parquet"
    assert found["trainer.vision_learning_rate"] == 0.0


@pytest.mark.parametrize(
    "given",
    [
        ["data.image_key=pictures"],
        ["data.video_key=videos"],
        [*TEACHER, f"{DISTIL}.use_policy_gradient=false", f"{DISTIL}.loss_mode=k3"],
        [f"{ROLLOUT}.name=trtllm"],
        [f"{ACTOR}.strategy=megatron", "actor_rollout_ref.model.lora.rank=32"],
        ["actor_rollout_ref.model.lora_adapter_path=/a"],
        [f"{ROLLOUT}.top_k=20"],
        [f"{ACTOR}.optim.betas=[0.8,0.999]"],
    ],
)
def test_what_verl_can_and_this_project_cannot_is_an_error(tmp_path: Path, given: list[str]) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    with pytest.raises(ConfigError, match=given[-1].partition("=")[0].rpartition(".")[2].partition("_")[0]):
        SOURCES["verl"](tmp_path / "run.sh", given)


def test_every_refusal_is_listed(tmp_path: Path) -> None:
    said = comments(tmp_path, "verl", "run.sh", VERL, f"{ROLLOUT}.n=1", f"{ROLLOUT}.temperature=0")
    assert "rollout.group_size" in said and "rollout.temperature" in said
    found = refusals({"rollout": {"temperature": 0, "engine": "trt"}, "trainer": {"steps": "x"}, "of": 1})
    for key in ("rollout.temperature", "rollout.engine", "trainer.steps"):
        assert any(key in line for line in found), key


SLIME = r"""
NVLINKS=$(nvidia-smi topo -m | wc -l)
if [ "$NVLINKS" -gt 0 ]; then HAS=1; else HAS=0; fi
if command -v nvidia-smi >/dev/null 2>&1; then FOUND=$(nvidia-smi -L | wc -l); else FOUND=0; fi
GPUS=${GPUS:-${FOUND}}
if [ -z "$GPUS" ] || [ "$GPUS" -le 0 ]; then GPUS=8; fi
if [ -z "$BASE" ]; then echo "set BASE"; exit 1; fi
ROLLOUT_ARGS=(
   --prompt-data ${BASE}/math.jsonl
   --input-key question
   --label-key label
   --rm-type deepscaler
   --num-rollout 30
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   #--rollout-max-context-len 1
   --rollout-temperature 0.9

   --num-steps-per-rollout 2
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime $BASE/a.jsonl gpqa $BASE/g.jsonl --n-samples-per-eval-prompt 16)
WANDB_ARGS=(
   # --use-wandb
)
ENV="{
  \"env_vars\": {\"HAS\": \"$HAS\"}
}"
ray start --head --num-gpus $GPUS
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="$ENV" -- python3 train.py \
   --actor-num-nodes 2 --actor-num-gpus-per-node $GPUS --colocate \
   --hf-checkpoint $BASE/model --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 4 \
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${WANDB_ARGS[@]} ${EVAL_ARGS[@]}
"""


def test_a_script_of_slimes(tmp_path: Path) -> None:
    found = ours(tmp_path, "slime", "run.sh", SLIME)
    assert (found["trainer.ranks"], found["rollout.engines"], found["rollout.tensor_parallel"]) == (16, 4, 4)
    assert (found["eval.samples"], found["eval.temperature"], found["eval.before"]) == (16, 0.9, True)
    assert [source["path"] for source in found["data.eval_path"]] == ["$BASE/a.jsonl", "$BASE/g.jsonl"]
    assert found["data.path"] == [{"path": "${BASE}/math.jsonl", "prompt": "{question}", "ground_truth": "{label}"}]
    assert (found["agent.max_tokens"], found["rollout.max_model_len"]) == (9216, 9216)
    assert (found["trainer.minibatches"], found["queue.max_staleness"], found["model.path"]) == (2, 0, "$BASE/model")
    assert found["reward.functions"][0]["name"] == "math"
    assert "data.eval_path" not in ours(tmp_path, "slime", "run.sh", SLIME.replace("--eval-interval 20", ""))
    late = ours(tmp_path, "slime", "run.sh", SLIME.replace("train.py", "train_async.py"))
    assert "queue.max_staleness" not in late, "1 is the default"


def test_what_slimes_script_leaves_to_megatron(tmp_path: Path) -> None:
    found = ours(tmp_path, "slime", "run.sh", SLIME)
    expected = {"trainer.weight_decay": 0.01, "trainer.beta2": 0.999, "trainer.schedule": "linear"}
    assert {key: found[key] for key in expected} == expected
    said = comments(tmp_path, "slime", "run.sh", SLIME)
    assert "attention-dropout and hidden-dropout" in said and "trainer.minibatches: " not in said
    warm = ours(tmp_path, "slime", "run.sh", SLIME, "lr-warmup-fraction=0.1")
    assert warm["trainer.warmup_steps"] == 30 * 2 // 10
    told = comments(
        tmp_path, "slime", "run.sh", SLIME, "attention-dropout=0.0", "hidden-dropout=0", "global-batch-size=100"
    )
    assert "dropout" not in told and "56 of 256 rows" in told


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--rollout-max-response-len 8192", "rollout.max_tokens"),
        ("--num-rollout 30", "trainer.steps"),
        ("--num-steps-per-rollout 2", "trainer.minibatches"),
    ],
)
def test_limits_that_slimes_script_leaves_out_are_to_be_filled_in(tmp_path: Path, flag: str, key: str) -> None:
    text = comments(tmp_path, "slime", "run.sh", SLIME.replace(flag, "")).partition("What to look at:")[0]
    assert key in text.partition("To fill in:")[2].partition("Defaults there")[0]


def test_limits_and_devices_of_slimes(tmp_path: Path) -> None:
    given = ["rollout-max-context-len=16384", "colocate=false", "rollout-num-gpus=8"]
    found = ours(tmp_path, "slime", "run.sh", SLIME, *given)
    lengths = [found[key] for key in ("data.max_prompt_tokens", "agent.max_tokens", "rollout.max_model_len")]
    assert lengths == [16383, 16384, 16384] and found["rollout.engines"] == 2


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("custom-rm-path=my.rewards.score", "reward.functions", [{"name": "my.rewards:score"}]),
        ("custom-generate-function-path=my.loop.play", "agent.loop", "my.loop:play"),
        ("rm-type=f1", "reward.functions", [{"name": "FILL_IN.py:f1"}]),
        ("dynamic-sampling-filter-path=x.check_reward_nonzero_std", "algorithm.shaping.dynamic_sampling", True),
        ("advantage-estimator=cispo", "algorithm.loss", "cispo"),
        ("eval-top-k=1", "eval.temperature", 0),
        ("eval-temperature=0.5", "eval.temperature", 0.5),
        ("use-opsm=true", "algorithm.off_policy_mask", 1e-4),
        ("use-rollout-routing-replay=true", "trainer.router_replay", "always"),
        ("multimodal-keys={'image': 'images'}", "model.path", "$BASE/model"),
        ("sglang-expert-parallel-size=2", "rollout.expert_parallel", 2),
        ("update-weight-buffer-size=4096", "weight_sync.bucket_bytes", 4096),
        # The engines' GPUs may be fewer than those of the trainer, also where they share them.
        ("rollout-num-gpus=8", "rollout.engines", 2),
        ("custom-advantage-function-path=my.advantages.mine", "algorithm.advantage", "my.advantages:mine"),
        ("custom-reward-post-process-path=my.rewards.scaled", "algorithm.advantage", "my.rewards:scaled"),
        ("disable-rewards-normalization=true", "algorithm.advantage", "FILL_IN.py:rewards"),
        ("advantage-estimator=ppo", "algorithm.advantage_options.whiten", False),
    ],
)
def test_further_flags_of_slimes(tmp_path: Path, given: str, key: str, value: Any) -> None:
    assert ours(tmp_path, "slime", "run.sh", SLIME, given)[key] == value


def test_a_critic_of_slimes_has_the_optimizer_of_its_policy(tmp_path: Path) -> None:
    given = ["advantage-estimator=ppo", "lr=3e-6", "num-critic-only-steps=5", "clip-grad=0.5"]
    found = ours(tmp_path, "slime", "run.sh", SLIME, *given)
    keys = ("learning_rate", "schedule", "warmup_steps", "grad_clip")
    assert [found[f"critic.{key}"] for key in keys] == [3e-6, "linear", 5, 0.5]


def test_slime_whitens_only_when_told_to(tmp_path: Path) -> None:
    given = ["advantage-estimator=ppo", "normalize-advantages=true"]
    assert ours(tmp_path, "slime", "run.sh", SLIME, *given)["algorithm.advantage_options.whiten"] is True
    assert "algorithm.advantage: normalize-advantages" in comments(tmp_path, "slime", "run.sh", SLIME, given[1])


@pytest.mark.parametrize(("estimator", "place"), [("gspo", None), ("reinforce-plus-plus", "reward")])
def test_a_penalty_of_slimes_in_the_reward_is_there_only_where_it_is_read(
    tmp_path: Path, estimator: str, place: str | None
) -> None:
    given = ["kl-coef=0.1", f"advantage-estimator={estimator}"]
    found = ours(tmp_path, "slime", "run.sh", SLIME, *given)
    assert found.get("algorithm.kl.place") == place and ("algorithm.kl.coef" in found) == (place is not None)


def test_late_publications_of_slimes_make_rows_as_much_older(tmp_path: Path) -> None:
    late = SLIME.replace("train.py", "train_async.py")
    found = ours(tmp_path, "slime", "run.sh", late, "update-weights-interval=3")
    assert (found["weight_sync.every"], found["queue.max_staleness"]) == (3, 3)
    found = ours(tmp_path, "slime", "run.sh", SLIME, "update-weights-interval=3")
    assert "weight_sync.every" not in found and found["queue.max_staleness"] == 0, "train.py does not read it"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["eval-config=e.yaml"], "data.eval_path"),
        (["rollout-function-path=my.rollout.run"], "agent.loop"),
        (["custom-tis-function-path=my.weights.tis"], "algorithm.correction"),
    ],
)
def test_code_and_files_of_slimes_that_are_not_read_are_to_be_filled_in(
    tmp_path: Path, given: list[str], name: str
) -> None:
    text = comments(tmp_path, "slime", "run.sh", SLIME, *given)
    filled = text.partition("To fill in:")[2].partition("\n\n")[0].partition("What to look at:")[0]
    assert f"{name}: " in filled


def test_evaluation_of_slimes_by_a_file_of_data_sets(tmp_path: Path) -> None:
    unread = SLIME.replace("--eval-prompt-data aime $BASE/a.jsonl gpqa $BASE/g.jsonl", '--eval-config "$(pwd)/e.yaml"')
    found = ours(tmp_path, "slime", "run.sh", unread)
    assert [source["path"] for source in found["data.eval_path"]] == ["FILL_IN.jsonl"] and found["eval.before"]
    found = ours(tmp_path, "slime", "run.sh", SLIME, "eval-config=e.yaml")
    assert [source["path"] for source in found["data.eval_path"]] == ["FILL_IN.jsonl"], "it replaces the flag"


def test_held_out_rows_of_slimes_may_have_other_columns(tmp_path: Path) -> None:
    found = ours(tmp_path, "slime", "run.sh", SLIME, "eval-input-key=prompt", "eval-label-key=answer")
    assert found["data.eval_path"][0] == {"path": "$BASE/a.jsonl", "ground_truth": "{answer}"}


def test_weights_of_slimes_engines_that_are_not_those_in_training_are_named(tmp_path: Path) -> None:
    def named(trained: str) -> bool:
        return "model.path: $BASE/model is" in comments(tmp_path, "slime", "run.sh", SLIME, f"ref-load={trained}")

    assert named("/checkpoints/other_torch_dist/") and not named("/checkpoints/model_torch_dist/")


def test_a_setting_of_slimes_evaluation_is_a_loss_only_if_it_differs(tmp_path: Path) -> None:
    def lost(given: str) -> bool:
        return given.partition("=")[0] in comments(tmp_path, "slime", "run.sh", SLIME, given).replace(
            "and eval-top-k", ""
        )

    assert lost("eval-top-p=0.7") and not lost("eval-top-p=1")
    assert lost("eval-max-response-len=16384") and not lost("eval-max-response-len=8192")


def test_columns_and_templates_that_slime_is_not_given_are_told(tmp_path: Path) -> None:
    unlabelled = comments(tmp_path, "slime", "run.sh", SLIME.replace("--label-key label", ""))
    assert "without label-key" in unlabelled and "without label-key" not in comments(tmp_path, "slime", "run.sh", SLIME)
    assert "without apply-chat-template" in comments(tmp_path, "slime", "run.sh", SLIME)
    assert "without apply-chat-template" not in comments(tmp_path, "slime", "run.sh", SLIME, "apply-chat-template=true")


def test_a_divergence_of_slimes_has_the_gradient_of_its_flag(tmp_path: Path) -> None:
    given = ["use-kl-loss=true", "kl-loss-coef=0.1", "kl-loss-type=k3", "use-unbiased-kl=true"]
    assert ours(tmp_path, "slime", "run.sh", SLIME, *given)["algorithm.kl.unbiased"] is True


@pytest.mark.parametrize("given", ["multimodal-keys=images", "opd-type=sglang", "loss-type=sft_loss"])
def test_what_slime_can_and_this_project_cannot_is_an_error(tmp_path: Path, given: str) -> None:
    (tmp_path / "run.sh").write_text(SLIME)
    with pytest.raises(ConfigError, match=given.partition("=")[0]):
        SOURCES["slime"](tmp_path / "run.sh", ["use-opd=true", given])


PRIME_RL = """
max_steps = 20
seq_len = 4096
[ckpt]
[model]
name = "m"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 1
num_infer_replicas = 4
[monitors.wandb]
project = "p"
[trainer.model]
cp = 4
[trainer.model.ac]
[trainer.model.lora]
rank = 8
target_modules = ["q_proj"]
[orchestrator]
batch_size = 512
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 1024
[[orchestrator.train.source]]
name = "wiki"
curriculum = { gates = { zero = { type = "advantage_range" } } }
[orchestrator.train.source.env.taskset]
id = "wiki-search"
turns = 3
[orchestrator.train.source.env.agent.harness]
id = "null"
[inference.vllm]
tensor_parallel_size = 2
quantization = "fp8"
"""


def test_a_toml_of_prime_rls_of_august_2026(tmp_path: Path) -> None:
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL)
    assert (found["trainer.ranks"], found["rollout.engines"], found["rollout.tensor_parallel"]) == (16, 16, 2)
    lengths = ("rollout.max_tokens", "agent.max_tokens", "rollout.max_model_len", "trainer.max_tokens_per_microbatch")
    assert [found[key] for key in lengths] == [1024, 4096, 4096, 4096]
    assert found["agent.environment"] == "verifiers:wiki-search" and found["reward.functions"] == [
        {"name": "environment"}
    ]
    assert found["agent.environment_options.taskset.turns"] == 3
    assert found["algorithm.shaping.dynamic_sampling"] and found["trainer.activation_checkpointing"]
    assert (found["trainer.lora.rank"], found["trainer.lora.targets"]) == (8, ["q_proj"])
    assert (found["rollout.quantization"], found["trainer.sequence_parallel"]) == ("fp8", 4)
    assert (found["trainer.checkpoint_every"], found["tracking.backends"]) == (0, ["wandb"])
    assert found["data.shuffle"] is False and "trainer.grad_clip" not in found


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("trainer.scheduler.type=cosine", "trainer.warmup_steps", 10),
        ("trainer.scheduler.type=linear", "trainer.warmup_steps", 10),
        ("trainer.model.full_offload=true", "trainer.grad_clip", 1e9),
        ("trainer.model.ep_comm_backend=deepep", "trainer.grad_clip", 1e9),
        ("trainer.model.fsdp_cpu_offload=true", "trainer.cpu_offload", True),
        ("trainer.model.full_offload.numa_bind=false", "trainer.grad_clip", 1e9),
        ("trainer.optim.max_norm=None", "trainer.grad_clip", 1e9),
        # A decay over all steps behind the warm-up is the schedule of that name here.
        ("trainer.scheduler={type: linear, warmup_steps: 4, decay_steps: 16}", "trainer.schedule", "linear"),
        ("trainer.scheduler={type: linear, decay_steps: 0}", "trainer.warmup_steps", 10),
        ("trainer.enable_router_replay=true", "trainer.router_replay", "always"),
        ("trainer.ckpt={interval: 7}", "trainer.checkpoint_every", 7),
        ("orchestrator.algo.length_penalty.type=linear", "algorithm.advantage", "FILL_IN.py:advantage"),
        ("trainer.model.dp_replicate=2", "trainer.replicas", 2),
        ("deployment.nodes_per_fsdp_group=1", "trainer.replicas", 2),
    ],
)
def test_further_keys_of_prime_rls(tmp_path: Path, given: str, key: str, value: Any) -> None:
    assert ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL, given)[key] == value


def test_prime_rls_muon_is_the_one_here_with_its_own_default_of_beta2(tmp_path: Path) -> None:
    whole = "[trainer]\n[orchestrator]\ngroup_size = 8\n"
    given = (tmp_path, "prime-rl", "rl.toml", whole, "trainer.optim.type=muon")
    found = ours(*given)
    assert found["trainer.optimizer"] == "muon"
    assert found.get("trainer.beta2", our_default("trainer.beta2")) == 0.95
    assert ours(*given, "trainer.optim.betas2=0.9")["trainer.beta2"] == 0.9
    assert "Nesterov" in comments(*given)
    with pytest.raises(ConfigError, match=r"trainer\.optim\.mu"):
        ours(*given, "trainer.optim.mu=0.8")


def test_defaults_of_prime_rls_that_its_file_leaves_out(tmp_path: Path) -> None:
    found = ours(tmp_path, "prime-rl", "rl.toml", "[trainer]\n[trainer.model.lora]\n[orchestrator]\ngroup_size = 8\n")
    expected = {
        "queue.max_staleness": 8,
        "data.train_batch_groups": 128 // 8,
        "trainer.weight_decay": 0.01,
        "trainer.beta2": 0.999,
        "trainer.lora.rank": 16,
        "trainer.activation_checkpointing": True,
        "trainer.checkpoint_every": 0,
        "algorithm.advantage": "dr_grpo",
        "algorithm.correction": "prime_rl",
        "agent.max_tokens": 2048,
        "rollout.max_tokens": 2048,
        "trainer.max_tokens_per_microbatch": 2048,
    }
    assert {key: found.get(key) for key in expected} == expected
    # What is not written must be the same default here.
    same = {"trainer.learning_rate": 1e-6, "trainer.grad_clip": 1.0, "rollout.temperature": 1.0}
    assert {key: our_default(key) for key in same} == same and not same.keys() & found.keys()
    off = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL.replace("[trainer.model.ac]", ""), "trainer.model.ac=None")
    assert "trainer.activation_checkpointing" not in off


def test_checkpoints_that_are_kept_there_and_deleted_here_are_told(tmp_path: Path) -> None:
    for source, name, text in (("slime", "run.sh", SLIME), ("verl", "run.sh", VERL), ("prime-rl", "rl.toml", PRIME_RL)):
        key = {"slime": "save-interval", "verl": "trainer.save_freq", "prime-rl": "ckpt.interval"}[source]
        assert "trainer.keep_checkpoints" not in comments(tmp_path, source, name, text)
        assert "trainer.keep_checkpoints" in comments(tmp_path, source, name, text, f"{key}=5")


def test_settings_of_prime_rls_parts_are_those_of_the_run(tmp_path: Path) -> None:
    alone = PRIME_RL.replace("max_steps = 20\n", "").replace('[model]\nname = "m"\n', "")
    parts = ["trainer.max_steps=20", "orchestrator.max_steps=20", "trainer.model.name=m", "orchestrator.model.name=m8"]
    found = ours(tmp_path, "prime-rl", "rl.toml", alone, *parts)
    assert (found["trainer.steps"], found["model.path"]) == (20, "m")
    assert "orchestrator.model.name = m8" in comments(tmp_path, "prime-rl", "rl.toml", alone, *parts)


EVALUATION = """
[orchestrator.eval]
interval = 5
num_examples = 32
skip_first_step = true
[orchestrator.eval.sampling]
temperature = 0.6
[[orchestrator.eval.source]]
name = "held-out"
group_size = 4
[orchestrator.eval.source.env.taskset]
id = "wiki-search"
"""


def test_evaluations_of_prime_rls_in_the_environment_of_training(tmp_path: Path) -> None:
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL + EVALUATION)
    assert found["data.eval_path"] == "artifacts/held-out.eval.jsonl"
    assert (found["eval.every"], found["eval.tasks"], found["eval.samples"]) == (5, 32, 4)
    assert (found.get("eval.before", False), found["eval.temperature"]) == (False, 0.6)
    usual = EVALUATION[EVALUATION.index("[[") :].replace("group_size = 4\n", "")
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL + usual)
    assert (found["eval.every"], found["eval.before"], found["eval.temperature"]) == (100, True, 1.0)
    assert found["eval.tasks"] > 1000 and "eval.samples" not in found
    other = EVALUATION.replace("wiki-search", "elsewhere")
    assert "data.eval_path" not in ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL + other)
    assert "held-out: every 5 steps" in comments(tmp_path, "prime-rl", "rl.toml", PRIME_RL + other)


def test_batches_of_prime_rls_that_count_tokens_are_to_be_filled_in(tmp_path: Path) -> None:
    tokens = PRIME_RL.replace("batch_size = 512", "token_batch_size = 4096")
    assert "data.train_batch_groups" not in ours(tmp_path, "prime-rl", "rl.toml", tokens)
    said = comments(tmp_path, "prime-rl", "rl.toml", tokens).partition("What to look at:")[0]
    assert "data.train_batch_groups" in said


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("orchestrator.batch_size=100", "orchestrator.group_size"),
        ("orchestrator.group_size=0", "orchestrator.group_size"),
        ("orchestrator.batch_size=100.5", "orchestrator.batch_size"),
        ("inference.vllm.tensor_parallel_size=3", "tensor_parallel_size"),
        ("deployment.nodes_per_fsdp_group=4", "nodes_per_fsdp_group"),
        ("orchestrator.train.sampling.extra_body.min_p=0.9", "min_p"),
        ("trainer.model.lora.dropout=0.1", "dropout"),
        ("trainer.model.lora.alpha=1.5", "alpha"),
        ("trainer.data.fake.batch_size=2", "fake"),
        ("trainer.model.vlm.vision_encoder_attr=x", "images"),
    ],
)
def test_settings_of_prime_rls_that_would_be_rounded_or_lost_are_errors(tmp_path: Path, given: str, named: str) -> None:
    (tmp_path / "rl.toml").write_text(PRIME_RL)
    with pytest.raises(ConfigError, match=named):
        SOURCES["prime-rl"](tmp_path / "rl.toml", [given])


OTHER_SOURCE = """
[[orchestrator.train.source]]
name = "other"
ratio = 0.5
[orchestrator.train.source.env.taskset]
id = "wiki-search"
"""


def test_several_environments_of_prime_rls_have_data_and_options_each(tmp_path: Path) -> None:
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL + OTHER_SOURCE)
    assert found["agent.environment"] == "verifiers:wiki,other"
    assert found["data.path"] == [{"path": "artifacts/wiki.jsonl"}, {"path": "artifacts/other.jsonl", "weight": 0.5}]
    assert found["agent.environment_options.wiki.taskset.turns"] == 3
    assert found["agent.environment_options.other.taskset.id"] == "wiki-search"
    # Only one of them draws groups anew.
    assert "algorithm.shaping.dynamic_sampling" not in found


def test_what_all_sources_of_prime_rls_have_is_the_runs(tmp_path: Path) -> None:
    algo = "[orchestrator.train.source.algo]\ntype = 'max_rl'\n"
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL.replace("[inference", f"{algo}[inference"))
    assert found["algorithm.advantage"] == "max_rl"


def test_prime_rls_algorithms(tmp_path: Path) -> None:
    teacher = [
        "orchestrator.algo.teacher.name=org/Large",
        "orchestrator.algo.teacher.base_url=http://127.0.0.1:8001/v1",
        # Rows that ranks share cannot be scored by a server.
        "trainer.model.cp=1",
    ]
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL, "orchestrator.algo.type=opd", *teacher)
    endpoint = [found[f"algorithm.teacher.endpoint.{key}"] for key in ("url", "model")]
    assert endpoint == ["http://127.0.0.1:8001/v1", "org/Large"] and "algorithm.teacher.divergence" not in found
    itself = ["orchestrator.algo.type=opsd", "orchestrator.algo.demo_key=answer"]
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL, *itself)
    assert "<demonstration>\n{ground_truth}\n</demonstration>" in found["algorithm.teacher.hint"]
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL, "orchestrator.algo.type=max_rl")
    assert found["algorithm.advantage"] == "max_rl"
    for given, coef in (((), 0.1), (("orchestrator.algo.roles.user.alpha=0.3",), 0.3)):
        found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL, "orchestrator.algo.type=echo", *given)
        assert (found["algorithm.advantage"], found["algorithm.observations.coef"]) == ("dr_grpo", coef)


def test_prime_rls_warmup_counts_only_with_a_schedule_that_has_one(tmp_path: Path) -> None:
    schedule = ["trainer.scheduler.type=cosine", "trainer.scheduler.warmup_steps=3"]
    assert ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL, *schedule)["trainer.warmup_steps"] == 3
    assert "trainer.warmup_steps" not in ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL)


def test_lengths_of_prime_rls_parts(tmp_path: Path) -> None:
    given = ["orchestrator.seq_len=8192", "trainer.model.seq_len=16384", "inference.vllm.max_model_len=10000"]
    found = ours(tmp_path, "prime-rl", "rl.toml", PRIME_RL, *given)
    assert (found["agent.max_tokens"], found["rollout.max_model_len"]) == (8192, 10000)
    assert found.get("trainer.max_tokens_per_microbatch", 16384) == 16384


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("[[orchestrator.train.source]]\nname = 'other'\n", "several"),
        (f"{OTHER_SOURCE}[orchestrator.train.source.algo]\ntype = 'opd'\n", "algo of other"),
        (OTHER_SOURCE.replace("other", "wiki"), "two sources"),
        ("[orchestrator.algo]\ntype = 'opd'\n", "orchestrator.algo"),
        ("[orchestrator.algo]\ntype = 'rae'\n", "orchestrator.algo"),
        ("[orchestrator.algo]\ntype = 'echo'\nroles = {tool.alpha = 0.1, user.alpha = 0.2}\n", "roles"),
        ("[orchestrator.algo]\ntype = 'echo'\nfilter.import_path = 'm.f'\n", "filter"),
        ("[trainer.loss]\ntype = 'custom'\n", "trainer.loss"),
        ("[model.vlm]\nvision = 'x'\n", "images"),
    ],
)
def test_what_prime_rl_can_and_this_project_cannot_is_an_error(tmp_path: Path, more: str, named: str) -> None:
    (tmp_path / "rl.toml").write_text(PRIME_RL + more)
    with pytest.raises(ConfigError, match=named):
        SOURCES["prime-rl"](tmp_path / "rl.toml", [])


TRL = '''
"""
The trainer's example, with prose that isn't a command.

```sh
accelerate launch --num_processes 4 examples/grpo.py \\
    --model_name_or_path Qwen/Qwen3-0.6B \\
    --max_completion_length 1024 \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 \\
    --use_peft --lora_target_modules "q_proj", "v_proj"
```
"""
import argparse
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.rewards import accuracy_reward


def brevity(completions, **kwargs):
    return [0.0 for _ in completions]


def search(query: str) -> str:
    return query


parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=5e-6)
args = parser.parse_args()
CONFIG
dataset = load_dataset("AI-MO/NuminaMath-TIR", split="train")
dataset = dataset.map(lambda row: {"prompt": row["problem"]})
trainer = GRPOTrainer(model="m", args=training_args, reward_funcs=[accuracy_reward, brevity], train_dataset=dataset,
                      tools=[search])
'''
FLAGS = "training_args = TrlParser((GRPOConfig,)).parse_args_and_config()[0]"
CALL = """
kwargs: dict = dict(learning_rate=args.learning_rate, max_completion_length=2048)
training_args = GRPOConfig(**kwargs, num_generations=4, max_steps=7)
"""


def test_a_program_of_trls_that_takes_flags_is_read_by_the_command_in_its_text(tmp_path: Path) -> None:
    found = ours(tmp_path, "trl", "grpo.py", TRL.replace("CONFIG", FLAGS))
    assert (found["model.path"], found["data.path"]) == ("Qwen/Qwen3-0.6B", "AI-MO/NuminaMath-TIR:train")
    assert (found["rollout.max_tokens"], found["agent.max_tokens"], found["rollout.max_model_len"]) == (
        1024,
        2048,
        2048,
    )
    assert (found["trainer.lora.rank"], found["trainer.lora.targets"]) == (16, ["q_proj", "v_proj"])
    assert [term["name"] for term in found["reward.functions"]] == ["math", f"{tmp_path}/grpo.py:brevity"]
    assert found["agent.max_turns"] == 1024, "only tokens end an episode there"
    assert (found["agent.tools"], found["agent.loop"]) == ([f"{tmp_path}/grpo.py:search"], "tool_agent")


def test_a_program_of_trls_that_calls_its_config(tmp_path: Path) -> None:
    found = ours(tmp_path, "trl", "grpo.py", TRL.replace("CONFIG", CALL))
    assert (found["trainer.learning_rate"], found["rollout.max_tokens"]) == (5e-6, 2048)
    assert (found["rollout.group_size"], found["trainer.steps"], found["model.path"]) == (4, 7, "m")


def test_a_command_of_trls(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model_name_or_path: other\nlearning_rate: 2.0e-6\n")
    script = "M=${M:-Qwen/Q}\ntrl grpo --config c.yaml --model_name_or_path $M --dataset_name a/b --use_vllm \\\n"
    script += (
        "  --reward_funcs accuracy_reward --num_processes 8 --per_device_train_batch_size 4 --output_dir $HOME/o\n"
    )
    found = ours(tmp_path, "trl", "run.sh", script)
    assert (found["model.path"], found["data.path"], found["trainer.learning_rate"]) == ("Qwen/Q", "a/b:train", 2e-6)
    assert (found["trainer.ranks"], found["rollout.engines"], found["mode"]) == (8, 8, "colocated")
    assert (found["data.train_batch_groups"], found["reward.functions"][0]["name"]) == (4, "math")


@pytest.mark.parametrize(
    "program",
    [
        TRL.replace("CONFIG", FLAGS).replace('row["problem"]', 'row["image"]'),
        TRL.replace("CONFIG", FLAGS).replace("accelerate", "Accelerate"),
        TRL.replace("CONFIG", "training_args = None"),
    ],
)
def test_a_program_of_trls_that_says_nothing_or_shows_images_is_an_error(tmp_path: Path, program: str) -> None:
    (tmp_path / "grpo.py").write_text(program)
    with pytest.raises(ConfigError):
        SOURCES["trl"](tmp_path / "grpo.py", [])
