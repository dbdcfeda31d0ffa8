"""`pettingzoo:ID`: games of PettingZoo in which agents take turns (AEC), each agent as a role."""

from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.environments.adapters.gymnasium import action_of, how_to_act
from rl_async.agent_loop.environments.adapters.seeds import seed_of
from rl_async.agent_loop.plain_text import without_escapes
from rl_async.agent_loop.step import Step
from rl_async.messages import Task


class PettingZoo:
    """Options are those of ``pettingzoo.make``.

    With ``render_mode: ansi`` the rendering is what an agent sees. Actions are as for `gymnasium:NAME`; an answer that
    is none, or is not allowed at that moment, is not played, and the agent is told. A reward of the game counts for the
    agent that gets it, whoever moved.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        import pettingzoo

        self._seed, self._game = seed_of(task), pettingzoo.make("aec", name, **options)
        self.roles = tuple(map(str, self._game.possible_agents))
        for agent in self._game.possible_agents:  # raises for actions that are neither text nor numbers
            how_to_act(f"pettingzoo:{name}", self._game.action_space(agent))
        self._totals = dict.fromkeys(self.roles, 0.0)

    def reset(self) -> Step:
        self._game.reset(seed=self._seed)
        return self._turn()

    def step(self, answer: str) -> Step:
        agent = self._game.agent_selection
        allowed = self._allowed(agent)
        action = action_of(answer, self._game.action_space(agent))
        if action is None or (allowed is not None and action not in allowed):
            return Step(self._how(agent), to=str(agent), reason="no action")
        self._play(action)
        while self._game.agents and self._is_over(self._game.agent_selection):
            self._play(None)
        return self._turn() if self._game.agents else Step(done=True)

    def reward(self) -> dict[str, float]:
        return dict(self._totals)

    def close(self) -> None:
        self._game.close()

    def _play(self, action: Any) -> None:
        self._game.step(action)
        for agent, reward in self._game.rewards.items() if action is not None else ():
            self._totals[str(agent)] += float(reward)

    def _is_over(self, agent: Any) -> bool:
        return bool(self._game.terminations[agent] or self._game.truncations[agent])

    def _turn(self) -> Step:
        agent = self._game.agent_selection
        seen = self._game.render() if self._game.render_mode == "ansi" else self._observed(agent)
        return Step(f"{without_escapes(str(seen))}\n{self._how(agent)}".strip(), to=str(agent))

    def _observed(self, agent: Any) -> Any:
        seen = self._game.observe(agent)
        return seen["observation"] if isinstance(seen, Mapping) and "observation" in seen else seen

    def _allowed(self, agent: Any) -> list[int] | None:
        """Return the actions that are allowed now; None if the game does not say."""
        seen = self._game.observe(agent)
        mask = seen.get("action_mask") if isinstance(seen, Mapping) else self._game.infos[agent].get("action_mask")
        return None if mask is None else [place for place, may in enumerate(mask) if may]

    def _how(self, agent: Any) -> str:
        allowed = self._allowed(agent)
        told = how_to_act("", self._game.action_space(agent))
        return told if allowed is None else f"Answer with one of these numbers: {', '.join(map(str, allowed))}."
