"""verifiers' own adapter of reasoning-gym: a SingleTurnEnv with its data, parser and rubric."""

from typing import Any

from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv


def load_environment(**options: Any) -> ReasoningGymEnv:
    return ReasoningGymEnv(gym="basic_arithmetic", num_train_examples=4, num_eval_examples=0, **options)
