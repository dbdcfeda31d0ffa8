"""An episode in progress: its messages, and its tokens exactly as they were sampled."""

import asyncio
import time
from collections.abc import Sequence

from rl_async.agent_loop.chat_formats.format import BAD_CALL, CannotBridge, ChatFormat, Message, ParsedCall, TooLong
from rl_async.agent_loop.episodes.row_tokens import RowTokens
from rl_async.agent_loop.tools.tool import Tool, ToolResult
from rl_async.configs.derived.samples import is_baseline
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError
from rl_async.messages import LeasedGroup, Sampling, ToolCall, Trajectory, Turn
from rl_async.offload import off_loop
from rl_async.rollout_server.api import GenerateRequest, Generator


class Episode:
    """What a loop drives: ``generate`` samples a turn, ``call`` runs tools, ``add`` appends messages of others.

    Sampled tokens are only ever appended to, never re-tokenised from text.
    """

    def __init__(
        self,
        group: LeasedGroup,
        sample: int,
        *,
        config: RunConfig,
        chat: ChatFormat,
        generator: Generator,
        tools: Sequence[Tool],
    ) -> None:
        self.task = group.task
        self.config = config
        self.messages: list[Message] = list(group.task.prompt)
        self.tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema for tool in tools]
        self.turns: list[Turn] = []
        self._said: list[int] = []  # the tokens of the last turn that was sampled
        self._group, self._sample = group, sample
        self._chat, self._generator = chat, generator
        self._id = f"{group.group_id}.{sample}.{group.attempt}"
        self._baseline = is_baseline(config, group.partition, sample)
        self._sampling = Sampling(temperature=0.0) if self._baseline else policy_sampling(config, group.partition)
        self._limit = min(config.agent.max_tokens, config.rollout.max_model_len)
        self._seconds = {"generate": 0.0, "tools": 0.0}
        self._began = time.monotonic()
        try:
            self._row = RowTokens(chat.prompt(self.messages, self.schemas, limit=self._limit))
        except TooLong as error:
            raise DataError(
                f"task {self.task.task_id}: its prompt of {error} leaves no room to answer within {self._limit} "
                "(agent.max_tokens, rollout.max_model_len)"
            ) from None
        for message in self.messages:
            self.turns.append(Turn(role=message["role"], text=message["content"], end=len(self._row)))

    @property
    def text(self) -> str:
        """The text of the last turn."""
        return self.turns[-1].text

    def tool_calls(self) -> list[ParsedCall]:
        """Parse the tool calls that the model wrote in the last turn."""
        prompt = self._row.token_ids[: len(self._row) - len(self._said)]
        return self._chat.parse(self._said, prompt_ids=prompt, tools=self.schemas).calls

    async def generate(self) -> str:
        """Sample a turn of the model; return why it ended: ``stop``, ``length`` or ``abort``."""
        room = min(self.config.rollout.max_tokens, self._limit - len(self._row))
        if room <= 0:
            return "length"
        request = GenerateRequest(
            request_id=f"{self._id}.{len(self.turns)}",
            token_ids=self._row.token_ids.copy(),
            sampling=self._sampling,
            max_tokens=room,
            stop_token_ids=self._chat.stop_token_ids,
            min_version=self._group.min_version,
        )
        began = time.monotonic()
        result = await self._generator.generate(request, session=self._id)
        seconds = time.monotonic() - began
        self._seconds["generate"] += seconds
        start = len(self._row)
        self._row.add_sampled(result)
        self._said = result.token_ids
        text = self._chat.turn_text(result.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        self.turns.append(Turn(role="assistant", text=text, start=start, end=len(self._row), seconds=seconds))
        return result.finish_reason

    def add(self, messages: Sequence[Message]) -> bool:
        """Append messages and open the next assistant turn.

        If they do not fit, or the turn before ended within its reasoning, append nothing and return False.
        """
        start = len(self._row)
        try:
            said = self._said if self.turns[-1].role == "assistant" else []
            prompt = self._row.token_ids[: start - len(said)]
            added = self._chat.bridge(prompt, said, messages, self.schemas, limit=self._limit - start)
        except (TooLong, CannotBridge):
            return False
        self._row.add(added)
        self.messages += messages
        for message in messages:
            self.turns.append(Turn(role=message["role"], text=message["content"], start=start, end=len(self._row)))
        return True

    async def call(self, calls: Sequence[ParsedCall]) -> list[Message]:
        """Run the calls concurrently and record them in the last turn; return a message for each, in order."""
        began = time.monotonic()
        agent = self.config.agent
        done = await asyncio.gather(*(self._call_one(call, i) for i, call in enumerate(calls)))
        self._seconds["tools"] += time.monotonic() - began
        messages = []
        for call, (result, seconds) in zip(calls, done):
            text = await off_loop(len(result.text), self._chat.cut, result.text, agent.tool_response_tokens)
            self.turns[-1].tool_calls.append(
                ToolCall(
                    name=call.name,
                    arguments=call.raw,
                    result=text,
                    error=result.error,
                    problem=call.problem,
                    seconds=seconds,
                )
            )
            message = {"role": "tool", "content": text, "name": call.name}
            messages.append(message | ({"tool_call_id": call.id} if call.id else {}))
        return messages

    async def _call_one(self, call: ParsedCall, position: int) -> tuple[ToolResult, float]:
        if call.arguments is None:
            return ToolResult(BAD_CALL, "bad call"), 0.0
        if position >= self.config.agent.max_parallel_calls:
            return ToolResult("error: too many calls", "too many calls"), 0.0
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolResult("error: unknown tool", "unknown tool"), 0.0
        began = time.monotonic()
        result = await tool.call(call.arguments, timeout_s=self.config.agent.tool_timeout_s)
        return result, time.monotonic() - began

    def drift(self) -> int | None:
        """Return the first token's position that differs from the chat template of the whole conversation, or None."""
        given = len(self.task.prompt)
        sampled = {i for i, m in enumerate(self.messages) if i >= given and m["role"] == "assistant"}
        return self._chat.check(self.messages, self._row.token_ids, self.schemas, sampled=sampled)

    def trajectory(self, finish_reason: str) -> Trajectory:
        """Return the row to train on, which has no reward yet."""
        group = self._group
        return Trajectory(
            task_id=self.task.task_id,
            group_id=group.group_id,
            sample=self._sample,
            attempt=group.attempt,
            episode_id=self._id,
            partition=group.partition,
            **self._row.arrays(),
            sampling=self._sampling,
            reward=0.0,
            baseline=self._baseline,
            finish_reason=finish_reason,
            turns=self.turns,
            timings={**self._seconds, "total": time.monotonic() - self._began},
            ground_truth=self.task.ground_truth,
        )


def policy_sampling(config: RunConfig, partition: str) -> Sampling:
    """Return the distribution from which a partition's tokens are sampled."""
    if partition == "eval":
        return Sampling(temperature=config.eval.temperature)
    rollout = config.rollout
    return Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
