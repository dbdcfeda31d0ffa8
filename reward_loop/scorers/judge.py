"""The scorer ``judge``: a language model behind an OpenAI-compatible URL grades conversations.

The verdict is a JSON object {"reason": text, "score": number}, parsed strictly: anything else, including a score out of
range, fails the scoring of the conversation. The reward is the score mapped from [lowest, highest] to [0, 1]. Verdicts
are cached by a hash of the request: in memory, or in a file that all workers and a resumed run share.
"""

import asyncio
import hashlib
import logging
import re
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl_async.concurrency import gather_or_cancel, outcomes
from rl_async.configs.schema.reward import JudgeConfig
from rl_async.errors import UserError
from rl_async.files import UNDECODABLE
from rl_async.messages import Turn
from rl_async.reward_loop.api import Conversation, Score, ScorerFailed
from rl_async.reward_loop.model_client import Poster, read_api_key, read_completion

log = logging.getLogger("rl_async.reward_loop")

T = TypeVar("T")
# Another worker's write takes milliseconds.
LOCK_S = 10.0


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A judge's ``score``, within the range that its prompt states, and its reason."""

    reason: str
    score: float


class Verdicts:
    """An SQLite table, in memory if ``path`` is None. Raises UserError if the file is not an SQLite database.

    Its calls run in one thread: a write waits for the disk, and for other workers' writes.
    """

    def __init__(self, path: Path | None) -> None:
        self._thread = ThreadPoolExecutor(1, "verdicts")
        try:
            self._db = sqlite3.connect(
                path or ":memory:", timeout=LOCK_S, check_same_thread=False, isolation_level=None
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS verdicts (request TEXT PRIMARY KEY, score REAL, reason TEXT)")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path}: cannot hold the judge's verdicts ({error}); delete it to ask again") from error

    async def get(self, request: str) -> Verdict | None:
        """Return the stored verdict on the request with that hash, or None."""
        row = await self._run(self._get, request)
        return None if row is None else Verdict(score=row[0], reason=row[1])

    async def put(self, request: str, verdict: Verdict) -> None:
        """Store a verdict, unless the request already has one."""
        await self._run(self._put, request, verdict)

    async def close(self) -> None:
        """Close the database and end its thread."""
        await self._run(self._db.close)
        self._thread.shutdown()

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _get(self, request: str) -> tuple[float, str] | None:
        found = self._db.execute("SELECT score, reason FROM verdicts WHERE request = ?", (request,)).fetchone()
        return None if found is None else (float(found[0]), str(found[1]))

    def _put(self, request: str, verdict: Verdict) -> None:
        self._db.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?)", (request, verdict.score, verdict.reason))


_HEADING = re.compile(r"^(?=[^\S\n]*\[\w+\]\s*$)", re.MULTILINE)

_SCHEMA = {
    "type": "object",
    # The reason comes first, so that the number can depend on it.
    "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
    "required": ["reason", "score"],
    "additionalProperties": False,
}
_FORMATS: dict[str, dict[str, Any]] = {
    "json_schema": {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": _SCHEMA}},
    "json_object": {"type": "json_object"},
}


class Judge:
    """Grades conversations. Equal requests share one verdict, from the cache ``verdicts`` or while one is in flight.

    With ``verdicts`` None every request is sent. Raises ConfigError if the environment lacks the API key.
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
            api_key=read_api_key(config.api_key_env, "reward.judge.api_key_env"),
        )
        self._in_flight: dict[str, asyncio.Task[Verdict | ScorerFailed]] = {}
        self._sent = self._shared_verdicts = self._tokens = 0

    async def score(self, conversation: Conversation) -> Score:
        """Return the judge's score, scaled to [0, 1], with its own number as ``raw``, and its reason.

        A judge that compares answers prefers this one or the ground truth. Raises ScorerFailed.
        """
        if not self._config.compare:
            return await self._grade(conversation)
        if not conversation.ground_truth:
            raise ScorerFailed("has no other answer and no ground truth to compare this one with")
        return await self.prefer(conversation, conversation.ground_truth)

    async def _grade(self, conversation: Conversation, other: str = "") -> Score:
        body = self._body(conversation, other)
        verdict = await (self._request(body) if self._verdicts is None else self._shared(body))
        if isinstance(verdict, ScorerFailed):
            raise verdict
        lowest, highest = self._config.lowest, self._config.highest
        return Score((verdict.score - lowest) / (highest - lowest), {"raw": verdict.score}, verdict.reason)

    async def prefer(self, conversation: Conversation, other: str) -> Score:
        """Return how far the judge prefers the conversation's answer to the text ``other``, from 0 to 1.

        Both orders are asked, since judges favour a place (arXiv:2306.05685, section 3.4). Raises ScorerFailed.
        """
        swapped = msgspec.structs.replace(conversation, solution_str=other)
        first, second = await gather_or_cancel(
            self._grade(conversation, other), self._grade(swapped, conversation.solution_str)
        )
        return Score((first.value + 1 - second.value) / 2, reason=first.reason)

    async def close(self) -> None:
        """Cancel requests in flight, and close connections and the cache."""
        for task in list(self._in_flight.values()):
            task.cancel()
        await outcomes(*self._in_flight.values())
        await self._poster.close()
        if self._verdicts is not None:
            await self._verdicts.close()
        log.info("judge: %d requests, %d shared verdicts, %d tokens", self._sent, self._shared_verdicts, self._tokens)

    async def _shared(self, body: dict[str, Any]) -> Verdict | ScorerFailed:
        assert self._verdicts is not None
        asked = [self._poster.url, body, self._config.lowest, self._config.highest]
        key = hashlib.sha256(msgspec.json.encode(asked, order="sorted")).hexdigest()
        task = self._in_flight.get(key)
        if task is None:
            task = self._in_flight[key] = asyncio.create_task(self._look_up(key, body), name="verdict")
            task.add_done_callback(lambda _: self._in_flight.pop(key))
        else:
            self._shared_verdicts += 1
        # Cancelling one conversation must not cancel the others' verdict.
        return await asyncio.shield(task)

    async def _look_up(self, key: str, body: dict[str, Any]) -> Verdict | ScorerFailed:
        assert self._verdicts is not None
        if (cached := await self._verdicts.get(key)) is not None:
            self._shared_verdicts += 1
            return cached
        outcome = await self._request(body)
        if isinstance(outcome, Verdict):
            await self._verdicts.put(key, outcome)
        return outcome

    async def _request(self, body: dict[str, Any]) -> Verdict | ScorerFailed:
        """Send a request. A failure is returned, not raised: many conversations may wait for the task, or none."""
        self._sent += 1
        try:
            return self._read(await self._poster.post(body))
        except ScorerFailed as failure:
            return failure

    def _read(self, raw: bytes) -> Verdict:
        completion = read_completion(raw, self._poster.url)
        choice = completion.choices[0]
        self._tokens += completion.tokens
        content = choice.message.content or ""
        if choice.message.refusal or choice.finish_reason not in ("stop", None):
            why = choice.message.refusal or f"it ended with {choice.finish_reason!r} (reward.judge.max_tokens)"
            raise ScorerFailed(f"gave no verdict: {why:.200}")
        try:
            verdict = msgspec.json.decode(content, type=Verdict)
        except UNDECODABLE as error:
            raise ScorerFailed(f"gave no verdict: {error} in {content!r:.200}") from error
        lowest, highest = self._config.lowest, self._config.highest
        if not lowest <= verdict.score <= highest:
            raise ScorerFailed(f"gave the score {verdict.score:g}, which is not from {lowest:g} to {highest:g}")
        return verdict

    def _body(self, conversation: Conversation, other: str) -> dict[str, Any]:
        config = self._config
        messages = [{"role": "system", "content": config.system}] if config.system else []
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [*messages, {"role": "user", "content": fill(config, conversation, other)}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        if config.response_format in _FORMATS:
            body["response_format"] = _FORMATS[config.response_format]
        return {key: value for key, value in (body | config.extra_body).items() if value is not None}


def fill(config: JudgeConfig, conversation: Conversation, other: str = "") -> str:
    """Fill the template's placeholders, all in one pass, so that a placeholder in a response stays text.

    Nor can a response close or open the tags of the template: ``</response>`` becomes ``&lt;/response>``.
    """
    turns = conversation.turns
    first_answer = next((i for i, turn in enumerate(turns) if turn.role == "assistant"), len(turns))
    values = {
        "prompt": turns[0].text if first_answer == 1 else transcript(turns[:first_answer]),
        "response": conversation.solution_str,
        "ground_truth": conversation.ground_truth,
        "conversation": transcript(turns),
        "lowest": f"{config.lowest:g}",
        "highest": f"{config.highest:g}",
    }
    values |= {"other": other} if config.compare else {}
    placeholders = re.compile(rf"{{({'|'.join(values)})}}")
    tags = "|".join(sorted(set(re.findall(r"</?([A-Za-z_][\w-]*)>", config.prompt)))) or r"(?!)"
    tag = re.compile(rf"<(?=\s*/?\s*(?:{tags})\b)", re.IGNORECASE)
    return placeholders.sub(lambda match: tag.sub("&lt;", values[match[1]]), config.prompt)


def transcript(turns: Sequence[Turn]) -> str:
    """Render turns as text, each headed by its role; a line inside a turn that looks like a heading is quoted."""
    return "\n\n".join(f"[{turn.role}]\n{_HEADING.sub('> ', turn.text)}" for turn in turns)
