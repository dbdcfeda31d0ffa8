"""An environment of verifiers 0.4: a task set with rewards and a metric, and a harness that offers a tool."""

import json
from typing import Any

import openai
import verifiers.v1 as vf

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class AddingData(vf.TaskData):
    answer: str


class AddingTask(vf.Task[AddingData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("no number")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def called(self, trace: vf.Trace) -> float:
        return float(bool(trace.tool_messages))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class AddingConfig(vf.TasksetConfig):
    system_text: str = "Add."


class AddingTaskset(vf.Taskset[AddingTask, AddingConfig]):
    def load(self) -> list[AddingTask]:
        data = AddingData(prompt="what is 2+3?", system_prompt=self.config.system_text, answer="5")
        return [AddingTask(data, self.config.task)]


class AddingHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> vf.ProgramResult:
        """Run the loop in this process, as harnesses may."""
        said, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": said}, {"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[ADD])
                message = answer.choices[0].message
                if message.content == "give up":
                    return vf.ProgramResult(exit_code=3, stdout="", stderr="the model gave up")
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    given = json.loads(call.function.arguments)
                    result = str(given["a"] + given["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


__all__ = ["AddingHarness", "AddingTaskset"]
