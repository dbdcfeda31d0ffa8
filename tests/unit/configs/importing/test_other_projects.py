"""Configs of projects that no importer reads are refused, with the kinds that can be read."""

from pathlib import Path

import pytest

from rl_async.configs.importing.importers import SOURCES
from rl_async.errors import ConfigError

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
