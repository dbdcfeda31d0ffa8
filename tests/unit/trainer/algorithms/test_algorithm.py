"""Users' own functions train like built-in ones, and what does not fit is named before training starts."""

from pathlib import Path

import pytest
import torch

from rl_async.configs.schema.algorithm import AdvantageOptions, AlgorithmConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.trainer.algorithms.algorithm import build, load_advantage, load_correction, load_loss
from rl_async.trainer.algorithms.losses import SelectInputs
from rl_async.trainer.algorithms.rows import Rows

HEAD = """
import torch
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.losses import PolicyLoss
"""

GOOD = (
    HEAD
    + """
def advantage(x):
    return torch.where(x.mask & x.scored[:, None], (x.rewards + x.parts["format"])[:, None], 0.0)

def loss(x):
    return -x.weights * x.advantages * (x.logprobs - x.proximal).exp()

def sequence_loss(x):
    length = x.mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (torch.where(x.mask, x.logprobs - x.proximal, 0.0).sum(1, keepdim=True) / length).exp()
    return -ratio * x.advantages

def correction(target, behaviour, mask, age):
    ratio = torch.where(mask, target - behaviour, 0.0).exp()
    return Corrected(ratio.clamp(max=1.5), mask & (age < 2), torch.zeros_like(mask, dtype=torch.uint8))

picky_loss = PolicyLoss(lambda x: torch.where(x.selected, loss(x), 0.0), lambda x: x.mask & (x.advantages != 0))
"""
)


@pytest.fixture
def write(tmp_path: Path):
    """``write(code)`` makes a module of it and gives its path."""

    def make(code: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(code)
        return path

    return make


def test_all_three_take_the_places_of_built_in_ones(write) -> None:
    path = write(GOOD)
    algorithm = AlgorithmConfig(advantage=f"{path}:advantage", loss=f"{path}:loss", correction=f"{path}:correction")
    built = build(RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), algorithm=algorithm))
    assert built.decoupled
    target = torch.tensor([[0.0, 1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    corrected = built.correct(target, torch.zeros(1, 2), mask, torch.tensor([[0, 3]]), mask)
    assert corrected.weights.tolist() == [[1.0, 1.5]] and corrected.keep.tolist() == [[True, False]]
    ends, rows = torch.tensor([0, 3, 0]), Rows(torch.tensor([2, 1]))  # a batch comes to it whole and padded
    packed = torch.tensor([0.0, 1.0, 1.0])
    corrected = built.correct(packed, torch.zeros(3), torch.ones(3, dtype=torch.bool), ends, None, rows)
    assert corrected.weights.tolist() == [1.0, 1.5, 1.5] and corrected.keep.tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["loss", "sequence_loss", "picky_loss"])
def test_losses_that_use_the_mask_are_accepted(write, name: str) -> None:
    loss = load_loss(f"{write(GOOD)}:{name}", AlgorithmConfig())
    assert (loss.select is not None) == (name == "picky_loss")
    if loss.select is not None:
        numbers, mask = torch.tensor([-1.0, -2.0, -3.0]), torch.ones(3, dtype=torch.bool)
        rows = Rows(torch.tensor([1, 2]))
        packed = SelectInputs(numbers, numbers, numbers, mask, AlgorithmConfig(), seed=0, rows=rows)
        assert torch.equal(loss.select(packed), rows.pack(loss.select(packed.padded())))


def test_an_advantage_sees_the_policy_and_the_critic_if_there_is_one(write) -> None:
    path = write(
        """import torch
def advantage(x):
    return torch.where(x.mask & x.scored[:, None], x.rewards[:, None] - x.values + 0 * x.logprobs, 0.0)
"""
    )
    load_advantage(f"{path}:advantage", AdvantageOptions(), critic=True)
    with pytest.raises(ConfigError, match=r"algorithm.advantage: .* raised TypeError"):
        load_advantage(f"{path}:advantage", AdvantageOptions())


def test_a_correction_that_names_an_unknown_rule_is_refused(write) -> None:
    path = write(
        HEAD + "def judge(target, behaviour, mask, age):\n"
        "    return Corrected(torch.ones_like(target), mask, mask.to(torch.uint8) * 200)\n"
    )
    with pytest.raises(ConfigError, match=r"algorithm\.correction.*200"):
        load_correction(f"{path}:judge")


def test_built_in_functions_keep_the_contract() -> None:
    load_advantage("rl_async.trainer.algorithms.advantages:grpo", AdvantageOptions())
    for name in ("ppo", "reinforce"):
        load_loss(f"rl_async.trainer.algorithms.losses:{name}", AlgorithmConfig())


BAD_LOSSES = [
    ("return x.logprobs.mean()", "gave shape [] for a batch of shape [2, 3]"),
    ("return 0.5", "gave a float, not a tensor"),
    ("return x.mask.long()", "gave torch.int64, not a floating type"),
    ("return -x.advantages", "has no gradient with respect to x.logprobs"),
    ("return -x.logprobs.detach() * x.advantages", "has no gradient with respect to x.logprobs"),
    ("return (x.logprobs * 0).log()", "not finite"),
    ("return -x.logprobs * x.advantages.mean()", "changes the loss of tokens with what stands at tokens whose mask"),
    ("return (-x.logprobs.square()).cumsum(1).flip(1)", "changes the loss of tokens"),
    ("return -x.logprobs * x.advantages.mul_(2.0)", "changes x.advantages in place"),
    ("x.mask[0] = False\n    return -x.logprobs * x.advantages * x.mask", "changes x.mask in place"),
    ("return x.logits", "raised AttributeError on a tiny batch"),
    ("return (x.logprobs - x.logprobs.detach()) * x.advantages.sum()", "changes the gradient of tokens"),
]


@pytest.mark.parametrize(("body", "message"), BAD_LOSSES)
def test_a_loss_that_does_not_fit_is_named(write, body: str, message: str) -> None:
    path = write(f"def loss(x):\n    {body}\n")
    with pytest.raises(ConfigError) as caught:
        load_loss(f"{path}:loss", AlgorithmConfig())
    assert f"algorithm.loss: {path}:loss " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return x.rewards", "gave shape [5] for a batch of shape [5, 3]; give one per token"),
        ("return x.token_rewards / 0", "not finite"),
        ("return x.scored[:, None] * x.token_rewards.cumsum(1).flip(1)", "changes the advantage of tokens"),
        ("return x.mask * (x.rewards - x.rewards.mean())[:, None]", "gave an advantage to a row without a reward"),
        (
            "import torch\n    best = torch.stack([x.rewards[(x.groups == g) & x.scored].mean() for g in x.groups])\n"
            "    return x.mask * (x.rewards - best)[:, None]",
            "not finite",
        ),
        ("return x.values", "gave a NoneType, not a tensor"),
        ("return x.token_rewards.mul_(x.mask)", "changes x.token_rewards in place"),
    ],
)
def test_an_advantage_that_does_not_fit_is_named(write, body: str, message: str) -> None:
    path = write(f"def advantage(x):\n    {body}\n")
    with pytest.raises(ConfigError) as caught:
        load_advantage(f"{path}:advantage", AdvantageOptions())
    assert f"algorithm.advantage: {path}:advantage " in str(caught.value) and message in str(caught.value)


RULE = "torch.zeros_like(m, dtype=torch.uint8)"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("(t - b).exp()", "gave a Tensor, not a Corrected"),
        (f"Corrected((t - b).exp(), m.float(), {RULE})", "gave keep as torch.float32, not torch.bool"),
        ("Corrected((t - b).exp(), m, m)", "gave rule as torch.bool, not torch.uint8"),
        (f"Corrected((t - b).exp(), m | True, {RULE})", "keeps tokens whose mask is false"),
        (f"Corrected((t - b).exp()[:, :1], m, {RULE})", "gave weights as shape [2, 1]"),
        (f"Corrected(-(t - b).exp(), m, {RULE})", "gave a negative weight"),
        (f"Corrected((t + b).sum(1, keepdim=True).exp().expand_as(t), m, {RULE})", "changes the weight of tokens"),
        (f"Corrected((t - b).exp(), m & (a.max() < 3), {RULE})", "changes the verdict of tokens"),
        (f"Corrected(t.sub_(b).exp(), m, {RULE})", "changes argument 1 in place"),
    ],
)
def test_a_correction_that_does_not_fit_is_named(write, result: str, message: str) -> None:
    path = write(f"{HEAD}\ndef correction(t, b, m, a):\n    return {result}\n")
    with pytest.raises(ConfigError) as caught:
        load_correction(f"{path}:correction")
    assert f"algorithm.correction: {path}:correction " in str(caught.value) and message in str(caught.value)


def test_what_is_not_there_is_named(write) -> None:
    path = write("LOSS = 3\n")
    for reference, message in [
        (f"{path}:loss", "has no 'loss'"),
        (f"{path}:LOSS", "is of type int, not a function"),
        ("nowhere.py:loss", "no file nowhere.py"),
        ("no_such_package.losses:loss", "cannot import 'no_such_package.losses'"),
    ]:
        with pytest.raises(ConfigError, match=r"algorithm\.loss") as caught:
            load_loss(reference, AlgorithmConfig())
        assert message in str(caught.value)
