"""A tool of verl, with the state and the rewards that its GSM8K example has."""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.reward_score import gsm8k

OPEN: dict[str, dict[str, Any]] = {}


class CheckTool(BaseTool):
    """Says what an answer is worth, and takes a little for one that is no better than the one before."""

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id, _ = await super().create(instance_id)
        OPEN[instance_id] = {"truth": ground_truth, "same": kwargs["create_kwargs"]["ground_truth"], "best": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        state = OPEN[instance_id]
        assert state["truth"] == state["same"]
        state["answer"] = f"#### {parameters['answer']}"
        worth = await self.calc_reward(instance_id)
        reward = 0.0 if worth > state["best"] else -0.05
        state["best"] = worth
        return ToolResponse(text=f"worth {worth:g}{kwargs.get('mark', '')}"), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = OPEN[instance_id]
        return float(gsm8k.compute_score(state.get("answer", ""), state["truth"], method="flexible"))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del OPEN[instance_id]


class Shouts(BaseTool):
    """Has a schema of its own, and nothing else."""

    def get_openai_tool_schema(self) -> Any:
        from verl.tools.schemas import OpenAIFunctionToolSchema

        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "shout", "description": "Shouts."}}
        )
