"""Looks up the functions of the algorithm in a config, once, before training begins.

Users' own advantages, losses and corrections are loaded here, and tried on a tiny batch before anything is trained.
They have the signatures of the built-in ones:

    advantage   (AdvantageInputs) -> float [N, T]
    loss        (LossInputs) -> float [B, T], or a PolicyLoss
    correction  (target, behaviour, mask, age: [N, T]) -> Corrected

A loss gets micro-batches. An advantage and a correction may average over the whole batch, and a PolicyLoss may pick
tokens over a mini-batch, so they get these whole and padded; only for them does a batch need memory for rows times the
longest row. Every loader raises ConfigError naming the key, the function, and the problem: the function is missing or
raises, or its result has a wrong shape or type, is not finite, has no gradient, learns from rows without a reward, or
depends on values where the mask is false; or it changes its inputs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import (
    RULES,
    AdvantageOptions,
    AlgorithmConfig,
    Correction,
    advantage_needs,
    resolve,
    rules,
)
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.trainer.algorithms.advantages import ADVANTAGES, AdvantageFn, AdvantageInputs
from rl_async.trainer.algorithms.correction import Corrected, correct
from rl_async.trainer.algorithms.losses import (
    AGGREGATIONS,
    ESTIMATORS,
    LOSSES,
    Counts,
    LossInputs,
    PolicyLoss,
    SelectInputs,
    Teaching,
    divergence_of,
)
from rl_async.trainer.backend import OutputName
from rl_async.trainer.packing import Rows
from rl_async.userload import is_user_reference, load_user_object


@dataclass(frozen=True)
class Algorithm:
    """The functions that ``update`` calls.

    Attributes:
        correct: takes target, behaviour, mask, age, free, all [B, T]; or packed [M], and their rows.
        rules: the rules that the correction may apply to a token.
        decoupled: whether pi_old is recomputed before the first mini-batch; otherwise it is mu.
        whole_reference: whether ``kl`` compares distributions over the whole vocabulary.
        divergence: from a teacher's whole distributions; None without a teacher, or if it scores sampled tokens.
        precompute: further outputs of the pass for pi_old, beside log-probabilities.
        train_outputs: further outputs of the passes with gradient.
    """

    advantage: AdvantageFn
    loss: PolicyLoss
    correct: Callable[..., Corrected]
    rules: tuple[str, ...]
    decoupled: bool
    # Whether the model of the section `critic` is a process reward model.
    process: bool
    aggregate: Callable[[Tensor, Tensor, Tensor, Counts], Tensor]
    kl: Callable[[Tensor, Tensor], Tensor]
    whole_reference: bool
    divergence: Callable[[Tensor, Teaching], Tensor] | None
    precompute: frozenset[OutputName]
    train_outputs: frozenset[OutputName]


def build(config: RunConfig) -> Algorithm:
    """Look up the functions that ``config`` names, and try users' own on a tiny batch.

    Raises ConfigError naming the key if a name is unknown or a user's function does not fit.
    """
    algorithm, critic, teacher = config.algorithm, config.critic, config.algorithm.teacher
    users_correction = is_user_reference(algorithm.correction)
    # A user's own correction is decoupled and goes with any loss.
    correction = Correction() if users_correction else resolve(algorithm.correction, algorithm.correction_options)
    precompute: set[OutputName] = set()
    if "sum_squares" in advantage_needs(algorithm.advantage):
        precompute.add("sum_squares")
    if algorithm.top_entropy < 1:
        precompute.add("entropy")
    train_outputs: set[OutputName] = set()
    if algorithm.entropy_coef > 0:
        train_outputs.add("entropy")
    if algorithm.keeps_distributions:
        train_outputs.add("distribution")
    if critic is not None and critic.shared:
        precompute.add("values")
        train_outputs.add("values")

    if is_user_reference(algorithm.advantage):
        options = algorithm.advantage_options
        advantage = load_advantage(algorithm.advantage, options, critic=critic is not None)
    else:
        advantage = ADVANTAGES[algorithm.advantage]
    name = correction.loss or algorithm.loss
    loss = load_loss(name, algorithm) if is_user_reference(name) else LOSSES[name]
    return Algorithm(
        advantage=advantage,
        loss=loss,
        correct=load_correction(algorithm.correction)
        if users_correction
        else lambda target, behaviour, mask, age, free, rows=None: correct(
            target, behaviour, mask, age, correction, free, rows
        ),
        rules=rules(correction),
        decoupled=correction.proximal == "recompute",
        process="process" in advantage_needs(algorithm.advantage),
        aggregate=AGGREGATIONS[algorithm.aggregation],
        kl=ESTIMATORS[algorithm.kl.estimator],
        whole_reference=algorithm.kl.estimator == "full",
        divergence=divergence_of(teacher) if teacher is not None and teacher.whole else None,
        precompute=frozenset(precompute),
        train_outputs=frozenset(train_outputs),
    )


# --- Users' own functions, tried on two rows of three tokens. Values where the mask is false must not matter.

MASK = torch.tensor([[True, True, False], [False, True, True]])
GARBAGE = (0.0, 7.0)
REWARDS = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0], dtype=torch.float64)


def _tensors(arguments: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among arguments, and those in fields of the others, each with a name for messages."""
    for number, argument in enumerate(arguments, 1):
        if isinstance(argument, Tensor):
            yield f"argument {number}", argument
            continue
        for field in fields(argument):
            if isinstance(value := getattr(argument, field.name), Tensor):
                yield f"x.{field.name}", value


@dataclass(frozen=True)
class Trial:
    """A user's object and the config key that names it."""

    key: str
    reference: str

    def error(self, what: str) -> ConfigError:
        """Make the error that names the key and the function."""
        return ConfigError(f"{self.key}: {self.reference} {what}")

    def load(self) -> Any:
        """Return the object. Raises ConfigError unless it is a function or a PolicyLoss."""
        loaded = load_user_object(self.reference, self.key)
        if not callable(loaded) and not isinstance(loaded, PolicyLoss):
            raise self.error(f"is of type {type(loaded).__name__}, not a function")
        return loaded

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function on a tiny batch. Raises ConfigError for any exception of it, and for a changed input."""
        before = {name: tensor.detach().clone() for name, tensor in _tensors(arguments)}
        try:
            result = function(*arguments)
        # The user's code may raise anything, and the error must name the function.
        except Exception as error:
            raise self.error(f"raised {type(error).__name__} on a tiny batch: {error}") from error
        changed = [name for name, tensor in _tensors(arguments) if not torch.equal(tensor, before[name])]
        if changed:
            raise self.error(
                f"changes {', '.join(changed)} in place, which the rest of the step still needs; compute a new tensor"
            )
        return result

    def tensor(self, value: object, shape: torch.Size, dtype: torch.dtype | None = None, name: str = "") -> Tensor:
        """Return a tensor of this shape and type or, without ``dtype``, floating and finite. Raises ConfigError."""
        named = f"gave {name} " if name else "gave "
        if not isinstance(value, Tensor):
            raise self.error(f"{named}a {type(value).__name__}, not a tensor")
        if value.shape != shape:
            raise self.error(f"{named}shape {list(value.shape)} for a batch of shape {list(shape)}; give one per token")
        if not (value.is_floating_point() if dtype is None else value.dtype == dtype):
            raise self.error(f"{named}{value.dtype}, not {dtype or 'a floating type'}")
        if dtype is None and not value.isfinite().all():
            raise self.error(f"{named}numbers that are not finite, for a batch of finite ones")
        return value

    def same(self, values: list[Tensor], mask: Tensor, name: str) -> None:
        """Raise ConfigError if garbage outside the mask changed the values inside it."""
        if not torch.allclose(values[0][mask], values[1][mask]):
            raise self.error(f"changes {name} of tokens with what stands at tokens whose mask is false; use the mask")


def load_advantage(reference: str, options: AdvantageOptions, *, critic: bool = False) -> AdvantageFn:
    """Load a user's advantage estimator and try it; with a ``critic`` it gets ``x.values``."""
    trial = Trial("algorithm.advantage", reference)
    function: AdvantageFn = trial.load()
    mask, given = MASK.repeat(3, 1)[:5], list[Tensor]()
    for garbage in GARBAGE:
        inputs = _advantage_inputs(mask, garbage, options, critic)
        given.append(trial.tensor(trial.call(function, inputs), mask.shape))
        if given[-1][mask & ~inputs.scored[:, None]].any():
            raise trial.error("gave an advantage to a row without a reward; give 0 where x.scored is false")
    trial.same(given, mask, "the advantage")
    return padded_estimator(function)


def load_loss(reference: str, options: AlgorithmConfig) -> PolicyLoss:
    """Load a user's policy loss, a function or a PolicyLoss, and try it."""
    trial = Trial("algorithm.loss", reference)
    loaded = trial.load()
    loss = loaded if isinstance(loaded, PolicyLoss) else PolicyLoss(loaded)
    values, gradients = list[Tensor](), list[Tensor]()
    for garbage in GARBAGE:
        inputs = _loss_inputs(garbage, options)
        if loss.select is not None:
            x = SelectInputs(inputs.proximal, inputs.behaviour, inputs.advantages, inputs.mask, options, seed=0)
            chosen = trial.tensor(trial.call(loss.select, x), MASK.shape, torch.bool, "a selection of")
            inputs = replace(inputs, selected=chosen)
        value = trial.tensor(trial.call(loss.per_token, inputs), MASK.shape)
        values.append(value.detach())
        gradients.append(_gradient(trial, value, inputs.logprobs))
    trial.same(values, MASK, "the loss")
    trial.same(gradients, MASK, "the gradient")
    select = loss.select
    if select is None:
        return loss
    return replace(loss, select=lambda x: select(x) if x.rows is None else x.rows.pack(select(x.padded())))


def load_correction(reference: str) -> Callable[..., Corrected]:
    """Load a user's off-policy correction and try it; return a function as in ``Algorithm.correct``.

    A user's correction measures all sampled tokens, including those that are not free.
    """
    trial = Trial("algorithm.correction", reference)
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Corrected] = trial.load()
    weights, kept = list[Tensor](), list[Tensor]()
    for garbage in GARBAGE:
        age = _with_garbage(torch.tensor([[0, 1, 2], [1, 0, 1]]), garbage)
        result = trial.call(function, _logprobs(0.05, garbage), _logprobs(0.0, garbage), MASK.clone(), age)
        if not isinstance(result, Corrected):
            raise trial.error(
                f"gave a {type(result).__name__}, not a Corrected (rl_async.trainer.algorithms.correction)"
            )
        keep = trial.tensor(result.keep, MASK.shape, torch.bool, "keep as")
        rule = trial.tensor(result.rule, MASK.shape, torch.uint8, "rule as")
        if int(rule.max()) >= len(RULES):
            raise trial.error(
                f"gave rule {int(rule.max())}; rules are indexes of RULES (configs/schema/algorithm.py), 0 for none"
            )
        if (keep & ~MASK).any():
            raise trial.error("keeps tokens whose mask is false")
        weights.append(torch.where(keep, trial.tensor(result.weights, MASK.shape, name="weights as"), 0.0))
        kept.append(keep.float())
        if (weights[-1] < 0).any():
            raise trial.error("gave a negative weight")
    trial.same(kept, MASK, "the verdict")
    trial.same(weights, MASK, "the weight")

    def correct(
        target: Tensor, behaviour: Tensor, mask: Tensor, age: Tensor, free: Tensor | None, rows: Rows | None = None
    ) -> Corrected:
        if rows is None:
            return function(target, behaviour, mask, age)
        given = function(*(rows.pad_all(tensor) for tensor in (target, behaviour, mask, age)))
        return Corrected(rows.pack(given.weights), rows.pack(given.keep), rows.pack(given.rule))

    return correct


def padded_estimator(function: AdvantageFn) -> AdvantageFn:
    """Turn an estimator of padded tensors into one that also takes packed ones."""
    return lambda x: function(x) if x.rows is None else x.rows.pack(function(x.padded()))


def _with_garbage(values: Tensor, garbage: float, mask: Tensor = MASK) -> Tensor:
    return torch.where(mask, values, torch.full_like(values, garbage))


def _logprobs(shift: float, garbage: float) -> Tensor:
    return _with_garbage(torch.tensor([[-1.0, -0.5, 0.0], [0.0, -2.0, -0.25]]) + shift, -garbage)


def _loss_inputs(garbage: float, options: AlgorithmConfig) -> LossInputs:
    return LossInputs(
        logprobs=_logprobs(0.05, garbage).requires_grad_(),
        proximal=_logprobs(0.0, garbage),
        behaviour=_logprobs(-0.05, garbage),
        advantages=_with_garbage(torch.tensor([[1.0, 1.0, 0.0], [0.0, -0.5, -0.5]]), garbage),
        weights=_with_garbage(torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 1.5]]), garbage),
        mask=MASK.clone(),
        free=MASK.clone(),
        options=options,
    )


def _gradient(trial: Trial, value: Tensor, logprobs: Tensor) -> Tensor:
    """Differentiate the sum over tokens that train with respect to log pi_theta, [B, T]."""
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value[MASK].sum(), logprobs, allow_unused=True)
    if gradient is None or not gradient.any():
        raise trial.error("has no gradient with respect to x.logprobs, so nothing would be learned")
    if not gradient.isfinite().all():
        raise trial.error("has a gradient that is not finite")
    return gradient


class _Parts(dict[str, Tensor]):
    """Parts of the reward under any name, since the real names are only known once an episode is scored."""

    def __missing__(self, name: str) -> Tensor:
        return REWARDS.clone()


def _advantage_inputs(mask: Tensor, garbage: float, options: AdvantageOptions, critic: bool) -> AdvantageInputs:
    """Make two groups of two rows, and one whose only row could not be scored."""
    last = torch.tensor([[False, True, False], [False, False, True]]).repeat(3, 1)[:5]
    return AdvantageInputs(
        rewards=REWARDS.clone(),
        token_rewards=_with_garbage(torch.where(last, REWARDS[:, None], 0.0), garbage, mask),
        mask=mask.clone(),
        groups=torch.tensor([3, 3, 5, 5, 7]),
        scored=torch.tensor([True, True, True, True, False]),
        row_weights=torch.ones(5, dtype=torch.float64),
        lengths=mask.sum(1).double(),
        turns=torch.where(mask, 0, -1),
        options=options,
        parts=_Parts(),
        values=_with_garbage(torch.full(mask.shape, 0.5, dtype=torch.float64), garbage, mask) if critic else None,
        logprobs=_with_garbage(torch.full(mask.shape, -0.5, dtype=torch.float64), garbage, mask),
        cut=torch.tensor([False, True, False, False, False]),
    )
