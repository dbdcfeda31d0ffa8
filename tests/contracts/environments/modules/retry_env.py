"""A MultiTurnEnv with state, stop conditions and a rubric, as verifiers' documentation has them."""

from typing import Any

import verifiers as vf
from datasets import Dataset


class Retry(vf.MultiTurnEnv):
    """Says whether an answer is right, and ends when it is."""

    async def setup_state(self, state: vf.State) -> None:
        state["wrong"] = 0

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        state["wrong"] += 1
        return [{"role": "user", "content": f"wrong {state['wrong']}"}]

    @vf.stop
    async def right(self, state: vf.State) -> bool:
        said = state["trajectory"][-1]["completion"][-1].content if state["trajectory"] else ""
        return said == state["answer"]


def load_environment(max_turns: int = 5) -> Retry:
    def correct(completion: Any, answer: str) -> float:
        return float(completion[-1].content == answer)

    def few_errors(state: vf.State) -> float:
        return 1.0 / (1 + state["wrong"])

    rubric = vf.Rubric(funcs=[correct, few_errors], weights=[1.0, 0.5])
    return Retry(dataset=Dataset.from_list([{"question": "?", "answer": "5"}]), rubric=rubric, max_turns=max_turns)
