"""Every advantage estimator and every loss on two tasks with three seeds, in one process, without engines or a queue.

    python examples/algorithms.py                                   # all 210 runs, some ten seconds of a processor each
    python examples/algorithms.py --advantages rloo opo --losses gspo cispo --tasks guess --seeds 1
    python examples/algorithms.py --ended                           # the table of the runs that are there

``update`` trains a policy of two layers on batches that are sampled here, with the policy's own forward pass, so that
the data are on-policy but for the second mini-batch of each step. Advantage estimators run with the ``ppo`` loss,
losses with ``grpo`` advantages. Each task has one start: a model that was shown conversations, two in five of them
perfect and the others random.

    sums    three numbers; the answer is their sum in two digits, rewarded with 1 if both are right
    guess   the bounds of a hidden number; three guesses, each answered with "lower" or "higher"; 1 if it is found

A run leaves a JSON file and is not trained again. A cell of the table is the mean reward of sampled answers to held-out
tasks, before and after training, with the lowest and the highest of the seeds.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from seeds import print_table
from transformers import AutoModelForCausalLM, LlamaConfig

from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import ADVANTAGES, LOSSES, advantage_needs
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import TrainingDiverged
from rl_async.messages import Sampling, Trajectory, Turn, Version, VersionRun
from rl_async.trainer.actor_critic import Models, build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.backend import Backend
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.packing import Tensors
from rl_async.trainer.update import update

# Tokens below it are numbers.
NUMBERS = 28
EQUALS, LOWER, HIGHER, FOUND = range(NUMBERS, NUMBERS + 4)
VOCABULARY = NUMBERS + 4

OF_ROWS = ["algorithm.aggregation=seq-mean-token-sum", "trainer.minibatches=1"]
# Settings that a method needs besides its name, and why.
NEEDS: dict[tuple[str, str], list[str]] = {
    ("advantage", "gae"): ["critic={learning_rate: 3e-3}"],
    ("advantage", "prime"): ["critic={learning_rate: 1e-4}"],
    # Only a group with a single best sample has a signal, and of 16 samples usually several succeed.
    ("advantage", "grpo_passk"): ["rollout.group_size=4", "data.train_batch_groups=64"],
    # Pairs are of whole rows and need the plain gradient.
    ("advantage", "dpo"): [*OF_ROWS, "algorithm.loss=reinforce"],
    ("loss", "sppo"): OF_ROWS,
    # It has a weight of its own.
    ("loss", "decoupled_ppo"): ["algorithm.correction=disabled"],
    # Without a ratio, a second mini-batch would be off-policy.
    ("loss", "reinforce"): ["trainer.minibatches=1"],
    ("loss", "gpg"): ["trainer.minibatches=1"],
    # Ratios that are normalised by length stay near 1.
    ("loss", "gspo"): ["algorithm.clip_low=3e-2", "algorithm.clip_high=4e-2"],
    # The paper's limits and aggregation.
    ("loss", "gmpo"): [
        "algorithm.clip_low=0.4",
        "algorithm.clip_high=0.4",
        "algorithm.aggregation=seq-mean-token-mean",
    ],
}


class Problem(NamedTuple):
    """A prompt, and the number that is asked for."""

    prompt: list[int]
    number: int


@dataclass
class Episode:
    """A conversation about a problem, and the log-probabilities of its sampled tokens."""

    problem: Problem
    tokens: list[int]
    turns: list[Turn]
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    ended: bool = False


class Task(NamedTuple):
    """A task of some turns with so many sampled tokens each; its warm start takes ``demonstrations`` steps."""

    problems: list[Problem]
    turns: int
    length: int
    demonstrations: int

    def split(self) -> tuple[list[Problem], list[Problem]]:
        """Return problems to train on, and those of a fifth of the prompts, held out; the same in every run."""
        prompts = sorted({tuple(problem.prompt) for problem in self.problems})
        kept = set(random.Random(0).sample(prompts, len(prompts) // 5))
        parts: tuple[list[Problem], list[Problem]] = ([], [])
        for problem in self.problems:
            parts[tuple(problem.prompt) in kept].append(problem)
        return parts

    def answer(self, episode: Episode) -> None:
        """Score the turn that has just been sampled, and append the reply to it."""
        said, number = episode.tokens[-self.length :], episode.problem.number
        start = len(episode.tokens) - self.length
        episode.turns.append(
            Turn(role="assistant", text=" ".join(map(str, said)), start=start, end=len(episode.tokens))
        )
        right = said == digits(number) if self.turns == 1 else said == [number]
        episode.reward, episode.ended = float(right), right or len(episode.turns) >= 2 * self.turns
        if not episode.ended:
            reply = LOWER if number < said[0] else HIGHER
            episode.turns.append(
                Turn(role="user", text=str(reply), start=len(episode.tokens), end=len(episode.tokens) + 1)
            )
            episode.tokens.append(reply)

    def demonstration(self, problem: Problem, draw: random.Random) -> list[int]:
        """Return a conversation that is perfect, or else, in three of five cases, one of random answers.

        A perfect guess halves the numbers that are left.
        """
        guesses, (low, high, *_) = draw.random() < 0.6, problem.prompt
        if self.turns == 1:
            return [*problem.prompt, *digits(draw.randrange(NUMBERS) if guesses else problem.number)]
        tokens = list(problem.prompt)
        while True:
            tokens.append(said := draw.randint(problem.prompt[0], problem.prompt[1]) if guesses else (low + high) // 2)
            if said == problem.number or len(tokens) >= len(problem.prompt) + 2 * self.turns - 1:
                return tokens
            tokens.append(LOWER if problem.number < said else HIGHER)
            low, high = (low, said - 1) if problem.number < said else (said + 1, high)


def digits(number: int) -> list[int]:
    """Write a number with two digits."""
    return [number // 10, number % 10]


TASKS = {
    "sums": Task(
        [Problem([a, b, c, EQUALS], a + b + c) for a in range(10) for b in range(10) for c in range(10)],
        turns=1,
        length=2,
        demonstrations=900,
    ),
    "guess": Task(
        [
            Problem([low, low + width, EQUALS], number)
            for width in range(3, 7)
            for low in range(NUMBERS - width)
            for number in range(low, low + width + 1)
        ],
        turns=3,
        length=1,
        demonstrations=500,
    ),
}


def warm_start(task: Task, folder: Path) -> None:
    """Train a new model on some demonstrations, and save it."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes))
    optimizer, draw = torch.optim.AdamW(model.parameters(), 1e-3), random.Random(0)
    problems, _ = task.split()
    for _ in range(task.demonstrations):
        shown = [task.demonstration(problem, draw) for problem in draw.sample(problems, 128)]
        tokens = torch.full((len(shown), max(map(len, shown))), FOUND)
        for row, said in zip(tokens, shown, strict=True):
            row[: len(said)] = torch.tensor(said)
        prompt = len(problems[0].prompt)
        logits = model(tokens).logits[:, prompt - 1 : -1].transpose(1, 2)
        targets = tokens[:, prompt:].where(tokens[:, prompt:] < NUMBERS, -100)
        torch.nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def play(policy: Backend, task: Task, problems: Sequence[Problem], draw: torch.Generator | None) -> list[Episode]:
    """Play an episode of each problem; without ``draw`` the likeliest token is taken."""
    episodes = [Episode(each, list(each.prompt), [asked(each)]) for each in problems]
    for _ in range(task.turns):
        playing = [episode for episode in episodes if not episode.ended]
        for _ in range(task.length if playing else 0):
            # A position's distribution is over the token after it, so that one more has to be there.
            tokens = torch.tensor([[*episode.tokens, 0] for episode in playing])
            size = tokens.shape[1]
            tensors = Tensors(
                tokens=tokens,
                lengths=torch.full((len(tokens),), size),
                mask=torch.ones(len(tokens), size - 1, dtype=torch.bool),
                temperature=torch.ones(len(tokens), 1, 1),
            )
            distribution = policy.forward(tensors, frozenset({"distribution"})).distribution
            assert distribution is not None
            logprobs = distribution[:, -1]
            if draw is None:
                sampled = logprobs.argmax(-1, keepdim=True)
            else:
                sampled = logprobs.exp().multinomial(1, generator=draw)
            for episode, token, logprob in zip(playing, sampled, logprobs.gather(1, sampled), strict=True):
                episode.tokens.append(int(token))
                episode.logprobs.append(float(logprob))
        for episode in playing:
            task.answer(episode)
    return episodes


def asked(problem: Problem) -> Turn:
    """Return the turn that asks for a number."""
    return Turn(role="user", text=str(problem.prompt), end=len(problem.prompt))


def trajectory(episode: Episode, group: int, sample: int, step: int, *, baseline: bool = False) -> Trajectory:
    """Return an episode as a row to train on."""
    mask = np.zeros(len(episode.tokens), bool)
    for turn in episode.turns:
        mask[turn.start : turn.end] = turn.role == "assistant"
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = episode.logprobs
    return Trajectory(
        task_id=str(group),
        group_id=group,
        sample=sample,
        attempt=0,
        episode_id=f"{group}.{sample}",
        token_ids=np.array(episode.tokens, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=[VersionRun(Version(0, step), 0, int(mask.sum()))],
        sampling=Sampling(),
        reward=episode.reward,
        reward_parts={"exact_answer": episode.reward},
        turns=episode.turns,
        baseline=baseline,
    )


def sampled_batch(config: RunConfig, models: Models, task: Task, step: int, draw: torch.Generator) -> Batch:
    """Sample groups of episodes of the training problems, and lay them out as a batch."""
    problems, size = task.split()[0], config.rollout.group_size
    chosen = [problems[int(i)] for i in torch.randint(len(problems), (config.data.train_batch_groups,), generator=draw)]
    played = play(models.policy, task, [problem for problem in chosen for _ in range(size)], draw)
    rows = [trajectory(episode, *divmod(i, size), step) for i, episode in enumerate(played)]
    if "greedy" in advantage_needs(config.algorithm.advantage):
        greedy = play(models.policy, task, chosen, None)
        rows += [trajectory(episode, group, size, step, baseline=True) for group, episode in enumerate(greedy)]
    headers = [row.header() for row in rows]
    plan = plan_batch(headers, step, config, models.policy.data_parallel.size, models.row_cost)
    return Batch(step, headers, plan, {row.key: row for row in rows})


def held_out(policy: Backend, task: Task) -> float:
    """Return the mean reward of four sampled answers to each of the held-out problems, with the same random numbers."""
    episodes = play(policy, task, task.split()[1] * 4, torch.Generator().manual_seed(0))
    return sum(episode.reward for episode in episodes) / len(episodes)


def run(task_name: str, kind: str, name: str, seed: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Train one run, and return its record: rewards ``before`` and ``after``, and of each step's samples."""
    task, folder = TASKS[task_name], arguments.runs / f"start-{task_name}"
    warm_start(task, folder)
    config = load_config(
        "calculator",
        [
            f"model.path={folder}",
            "model.dtype=float32",
            f"algorithm.{kind}={name}",
            f"trainer.steps={arguments.steps}",
            f"seed={seed}",
            "data.train_batch_groups=16",
            "trainer.learning_rate=3e-4",
            "trainer.schedule=constant",
            "queue.max_staleness=0",
            *NEEDS.get((kind, name), []),
            *arguments.override,
        ],
    )
    torch.manual_seed(seed)
    draw, began = torch.Generator().manual_seed(seed), time.process_time()
    models, algorithm = build_models(config, "cpu"), build(config)
    before, rewards = held_out(models.policy, task), list[float]()
    try:
        for step in range(arguments.steps):
            batch = sampled_batch(config, models, task, step, draw)
            sampled = [header.reward for header in batch.headers if not header.baseline]
            rewards.append(sum(sampled) / len(sampled))
            update(models, batch, algorithm, config, config.algorithm.kl.coef)
    except TrainingDiverged as error:
        return {"before": before, "rewards": rewards, "diverged": str(error)}
    seconds = time.process_time() - began
    return {"before": before, "after": held_out(models.policy, task), "rewards": rewards, "processor_s": seconds}


def cells(records: Sequence[dict[str, float]]) -> list[str]:
    """Return the cells of one task for the runs of one method: rewards before and after, their range, and the runs."""
    ended = [record for record in records if "after" in record]
    diverged = len(records) - len(ended)
    runs = f"{len(ended)}" + (f", {diverged} diverged" if diverged else "")
    if not ended:
        return ["", "not run" if not records else "", runs]
    after = [record["after"] for record in ended]
    mean = sum(after) / len(after)
    return [f"{ended[0]['before']:.2f}", f"{mean:.2f} ({min(after):.2f} to {max(after):.2f})", runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", nargs="*", choices=ADVANTAGES, default=list(ADVANTAGES))
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--ended", action="store_true", help="train nothing, tabulate runs that have ended")
    parser.add_argument("override", nargs="*", help="more a.b=c overrides")
    arguments = parser.parse_intermixed_args()
    methods = [("advantage", name) for name in arguments.advantages] + [("loss", name) for name in arguments.losses]
    torch.set_num_threads(1)
    own = {"steps": arguments.steps, "override": arguments.override}
    settings = arguments.runs / "settings.json"
    if settings.exists() and (theirs := json.loads(settings.read_text())) != own:
        parser.error(f"{arguments.runs} has runs with {theirs}; give another --runs")
    arguments.runs.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(own))
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # One seed of all methods first, so that a table of half the runs compares them.
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for kind, name in methods:
                file = arguments.runs / f"{task}-{kind}-{name}-{seed}.json"
                if not file.exists() and not arguments.ended:
                    record = run(task, kind, name, seed, arguments)
                    file.with_suffix(".part").write_text(json.dumps(record))
                    file.with_suffix(".part").replace(file)
                if file.exists():
                    found.setdefault((task, kind, name), []).append(json.loads(file.read_text()))
    dist.destroy_process_group()
    rows = [
        [kind, name, *(cell for task in arguments.tasks for cell in cells(found.get((task, kind, name), [])))]
        for kind, name in methods
    ]
    columns = [f"{task}: {column}" for task in arguments.tasks for column in ("before", "after", "runs")]
    print_table(["", "", *columns], rows)


if __name__ == "__main__":
    main()
