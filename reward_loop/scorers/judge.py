"""The scorer ``judge``: a language model behind an OpenAI-compatible URL grades conversations.

The verdict is a JSON object {"reason": text, "score": number}, read strictly: anything else, a score out of range
included, is a failure of this conversation's scoring. The reward is the score mapped from [lowest, highest] to [0, 1].
"""

import asyncio
import hashlib
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from rl_async.configs.schema.reward import JudgeConfig
from rl_async.errors import ConfigError
from rl_async.messages import Turn
from rl_async.reward_loop.api import Conversation, Score, ScorerFailed
from rl_async.reward_loop.post import Poster
from rl_async.reward_loop.scorers.verdicts import Verdict, Verdicts

log = logging.getLogger("rl_async.reward_loop")

_SCHEMA = {
    "type": "object",
    # The reason first: what is written before the number can still change it.
    "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
    "required": ["reason", "score"],
    "additionalProperties": False,
}
_FORMATS: dict[str, dict[str, Any]] = {
    "json_schema": {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": _SCHEMA}},
    "json_object": {"type": "json_object"},
}


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    total_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class Judge:
    """Asks once per request: equal ones share a verdict, also while it is being given. ``verdicts`` None: they do not.

    Raises ConfigError when the environment lacks the key.
    """

    def __init__(self, config: JudgeConfig, verdicts: Verdicts | None) -> None:
        self._config, self._verdicts = config, verdicts
        self._poster = Poster(
            f"{config.url.rstrip('/')}/chat/completions",
            section="reward.judge",
            timeout_s=config.timeout_s,
            attempts=config.attempts,
            backoff_s=config.backoff_s,
            max_concurrent=config.max_concurrent,
            per_minute=config.per_minute,
            api_key=api_key(config),
        )
        self._asking: dict[str, asyncio.Task[Verdict | ScorerFailed]] = {}
        self._asked = self._known = self._tokens = 0

    async def score(self, conversation: Conversation) -> Score:
        """The verdict as a number from 0 to 1; ``raw`` is the judge's own. Raises ScorerFailed."""
        body = self._body(conversation)
        verdict = await (self._shared(body) if self._verdicts is not None else self._outcome(body))
        if isinstance(verdict, ScorerFailed):
            raise verdict
        lowest, highest = self._config.lowest, self._config.highest
        return Score((verdict.score - lowest) / (highest - lowest), {"raw": verdict.score})

    async def close(self) -> None:
        """Give up what is being asked, and close connections and the cache."""
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._poster.close()
        if self._verdicts is not None:
            await self._verdicts.close()
        log.info("judge: %d verdicts asked for, %d known, %d tokens", self._asked, self._known, self._tokens)

    async def _shared(self, body: dict[str, Any]) -> Verdict | ScorerFailed:
        assert self._verdicts is not None
        request = hashlib.sha256(self._poster.url.encode() + msgspec.json.encode(body, order="sorted")).hexdigest()
        asking = self._asking.get(request)
        if asking is None:
            asking = self._asking[request] = asyncio.create_task(self._look_up(request, body), name="verdict")
            asking.add_done_callback(lambda _: self._asking.pop(request))
        else:
            self._known += 1
        return await asyncio.shield(asking)  # one conversation given up does not end the others' verdict

    async def _look_up(self, request: str, body: dict[str, Any]) -> Verdict | ScorerFailed:
        assert self._verdicts is not None
        if (known := await self._verdicts.get(request)) is not None:
            self._known += 1
            return known
        outcome = await self._outcome(body)
        if isinstance(outcome, Verdict):
            await self._verdicts.put(request, outcome)
        return outcome

    async def _outcome(self, body: dict[str, Any]) -> Verdict | ScorerFailed:
        """Ask. A failure is returned: the task's result may have many readers, or none any more."""
        self._asked += 1
        try:
            return self._read(await self._poster.post(body))
        except ScorerFailed as failure:
            return failure

    def _read(self, raw: bytes) -> Verdict:
        try:
            completion = msgspec.json.decode(raw, type=_Completion)
            choice = completion.choices[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise ScorerFailed(f"{self._poster.url} answered what is no chat completion: {error}") from error
        self._tokens += completion.usage.total_tokens if completion.usage else 0
        content = choice.message.content or ""
        if choice.message.refusal or choice.finish_reason not in ("stop", None):
            why = choice.message.refusal or f"it ended with {choice.finish_reason!r} (reward.judge.max_tokens)"
            raise ScorerFailed(f"gave no verdict: {why:.200}")
        try:
            verdict = msgspec.json.decode(content, type=Verdict)
        except msgspec.DecodeError as error:
            raise ScorerFailed(f"gave no verdict: {error} in {content!r:.200}") from error
        lowest, highest = self._config.lowest, self._config.highest
        if not lowest <= verdict.score <= highest:
            raise ScorerFailed(f"gave {verdict.score:g}, which is not from {lowest:g} to {highest:g}")
        return verdict

    def _body(self, conversation: Conversation) -> dict[str, Any]:
        config = self._config
        messages = [{"role": "system", "content": config.system}] if config.system else []
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [*messages, {"role": "user", "content": fill(config, conversation)}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        if config.response_format in _FORMATS:
            body["response_format"] = _FORMATS[config.response_format]
        return {key: value for key, value in (body | config.extra_body).items() if value is not None}


def api_key(config: JudgeConfig) -> str:
    """The key, from the environment. Raises ConfigError when the variable is missing or empty."""
    if not config.api_key_env:
        return ""
    if not (key := os.environ.get(config.api_key_env)):
        raise ConfigError(f"reward.judge.api_key_env: the environment has no {config.api_key_env}; export it first")
    return key


def fill(config: JudgeConfig, conversation: Conversation) -> str:
    """The template with its places filled, all at once: a response cannot smuggle in another place's name."""
    turns = conversation.turns
    spoken = next((i for i, turn in enumerate(turns) if turn.role == "assistant"), len(turns))
    values = {
        "prompt": turns[0].text if spoken == 1 else transcript(turns[:spoken]),
        "response": conversation.solution_str,
        "ground_truth": conversation.ground_truth,
        "conversation": transcript(turns),
        "lowest": f"{config.lowest:g}",
        "highest": f"{config.highest:g}",
    }
    places = re.compile(rf"{{({'|'.join(values)})}}")
    return places.sub(lambda match: values[match[1]], config.template)


def transcript(turns: Sequence[Turn]) -> str:
    """Turns as text, each headed by its role."""
    return "\n\n".join(f"[{turn.role}]\n{turn.text}" for turn in turns)
