"""Bounds on rounding, derived from type, magnitude and length of sums, so that any processor and thread count passes.

Two sources. A formula whose sums are known gets ``rounding``: Higham and Mary, "A New Approach to Probabilistic
Rounding Error Analysis" (SIAM J. Sci. Comput. 41, 2019), theorem 3.1. A whole model gets ``assert_as_close``: its
sums are too many to follow, so its plain pass is computed once in its own type and once in float64, and the path under
test may be no further from float64 than another order of the same sums explains.
"""

import copy
import math
import statistics
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# With rounding errors that are independent and have mean zero, a sum of n products is off by more than
# LIMIT * sqrt(n) * u * sum |a_i b_i| with a probability of at most 2 n exp(-LIMIT^2 / 2): less than 1e-12 n.
LIMIT = 8.0
# The largest of n normal errors exceeds the largest of n others of the same deviation by this factor once in a thousand
# times for n = 8, once in 50,000 for n = 16, and less than once in a million for n = 32.
LARGEST = 4.0
FEW = 16


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to the nearest number: half the distance from 1 to the next."""
    return torch.finfo(dtype).eps / 2


def rounding(scale: float | Tensor, terms: int, dtype: torch.dtype = torch.float32) -> Any:
    """Bound the error of a sum of ``terms`` products, in any order of summation.

    ``scale`` is the sum of the products' magnitudes, or a bound of it; a tensor gives a bound for each element. The
    growth is that of the probabilistic bound, sqrt(terms), since the deterministic one, gamma_n, grows with ``terms``
    and would hide faults of long sums.
    """
    return LIMIT * math.sqrt(max(1, terms)) * unit_roundoff(dtype) * scale


def pass_rounding(
    magnitude: float, layers: int, terms: int, *, backward: bool = False, dtype: torch.dtype = torch.float32
) -> float:
    """Bound how far two implementations of one decoder may be apart in numbers of this magnitude.

    A layer adds to its residual stream twice (attention and MLP), each time by sums of at most ``terms`` products of
    normalised states. The output layer is one more sum, a backward pass has as many as the forward pass, and both
    implementations round. States are normalised before each sum, which passes errors of earlier ones on about as large
    as they are, so that all roundings add up like those of one sum of that many terms.
    """
    sums = (2 * layers + 1) * (2 if backward else 1)
    return float(rounding(magnitude, 2 * sums * terms, dtype))


def assert_trained_alike(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    rate: float,
    steps: int,
    layers: int,
    terms: int,
) -> None:
    """Fail unless weights after so many steps of AdamW are those of the same gradients, summed in another order.

    A step moves a weight by rate * g / |g|, so that an error d of the gradient changes the move by
    rate * min(2, d / |g|): a weight of almost no gradient may go either way, and only the mean says something. With
    gradients of one deviation s and d = r s, the mean of min(2, r / |z|) over normal z is at most
    0.8 r (3 / 2 + log(2 / r)): the density of |z| is at most 0.8, which gives 0.8 r for |z| < r / 2,
    0.8 r log(2 / r) up to 1, and less than 0.4 r beyond. A tensor of few numbers counts as one of 64, lest one of
    almost no gradient decide.
    """
    assert found.keys() == expected.keys()
    r = pass_rounding(1.0, layers, terms, backward=True)
    mean = rate * steps * 0.8 * r * (1.5 + math.log(2 / r))
    for name, tensor in expected.items():
        # Weights are stored in float32, whatever their gradients are.
        stored = steps * unit_roundoff(torch.float32) * tensor.abs().double()
        off = ((found[name].double() - tensor.double()).abs() - stored).clamp(min=0)
        total, most = off.sum().item(), mean * max(64, tensor.numel())
        assert total <= most, f"{name}: weights are off by {total:.3g} in all, {total / most:.3g} times the bound"
        assert off.max() <= 2 * rate * steps, f"{name}: off by {off.max().item():.3g}, more than it can have moved"


def assert_near(found: Tensor, expected: Tensor, bound: float | Tensor, name: str = "values") -> None:
    """Fail unless each element is within ``bound`` of ``expected``, and say where it is furthest beyond."""
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)} and {tuple(expected.shape)}"
    off = (found.detach().double().cpu() - expected.detach().double().cpu()).abs()
    limit = torch.as_tensor(bound, dtype=torch.float64).expand_as(off)
    if bool((off <= limit).all()):
        return
    worst = int((off / limit.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num(torch.inf).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), off.shape)]
    error, most = off.flatten()[worst].item(), limit.flatten()[worst].item()
    beyond = int((~(off <= limit)).sum())
    raise AssertionError(
        f"{name}{place}: off by {error:.3g}, {error / most if most else math.inf:.3g} times the bound {most:.3g}; "
        f"{beyond} of {off.numel()} beyond it"
    )


def allowance(plain: Tensor, exact: Tensor, terms: int, typical: float = 0.0) -> float:
    """Bound the error of a result whose plain computation has the error ``plain - exact``, with other orders of sums.

    Both results round the same intermediate values, and differ in the order of sums of at most ``terms`` products. The
    error of a sum of n products has a deviation between u sqrt(log2 n), summed in pairs, and u sqrt(n), summed one by
    one (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2), so that the deviations of the
    two results are at most sqrt(n / log2 n) apart, and their largest errors LARGEST times that. A plain result that is
    exact by luck still allows one rounding of the result itself. ``typical`` is the size of the tensors that are
    computed along with it, which matters for one that cancels to zero.
    """
    error = (plain.double() - exact).abs().max().item()
    size = exact.abs().max().item()
    # A plain pass that kept less than two digits, or half of those of bfloat16, would allow anything.
    most = max(0.01, math.sqrt(torch.finfo(plain.dtype).eps)) * max(size, typical)
    assert error <= most, f"the plain pass is off by {error:.3g}, not only by rounding"
    one = unit_roundoff(plain.dtype) * size
    return LARGEST * math.sqrt(terms / math.log2(terms)) * max(error, one)


def allowances(plain: Mapping[str, Tensor], exact: Mapping[str, Tensor], terms: int) -> dict[str, float]:
    """Bound the errors of tensors that are computed together: see ``allowance``.

    A tensor of less than FEW elements may be exact by luck, so it is allowed the relative error that is the median of
    all tensors.
    """
    assert plain.keys() == exact.keys()
    sizes = {name: tensor.abs().max().item() for name, tensor in exact.items()}
    typical = statistics.median(sizes.values())
    allowed = {name: allowance(plain[name], tensor, terms, typical) for name, tensor in exact.items()}
    relative = statistics.median(allowed[name] / size for name, size in sizes.items() if size)
    few = {name: relative * sizes[name] for name, tensor in exact.items() if tensor.numel() < FEW}
    return {name: max(bound, few.get(name, 0.0)) for name, bound in allowed.items()}


def excess(found: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor], terms: int) -> float:
    """The largest error of a tensor, as a multiple of what is allowed to it."""
    assert found.keys() == plain.keys()
    multiples = []
    for name, bound in allowances(plain, exact, terms).items():
        off = (found[name].double() - exact[name]).abs().max().item()
        # A gradient that is zero in any arithmetic has no bound but zero.
        multiples.append(off / bound if bound else math.inf if off else 0.0)
    return max(multiples)


def assert_as_close(
    found: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor], terms: int
) -> None:
    """Fail unless each tensor is as close to float64 as ``plain`` is, but for the order of its sums."""
    assert found.keys() == plain.keys()
    for name, bound in allowances(plain, exact, terms).items():
        assert_near(found[name], exact[name], bound, name)


class _Double(TorchFunctionMode):
    """Makes float64 of what asks for float32: models compute norms, softmax and rotary angles in float32 by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **named)


def in_float64() -> AbstractContextManager[Any]:
    """Compute in float64 throughout, in a model that ``to_float64`` widened."""
    return _Double()


def to_float64(model: Any) -> Any:
    """Widen a Transformers model in place, with experts computed one by one, since grouped products lack the type."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()


class PlainPass:
    """Log-probabilities of a plain pass of a Transformers model, in its own type and in float64."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._exact = to_float64(copy.deepcopy(model))
        config = model.config.get_text_config()
        self._terms = max(config.hidden_size, config.intermediate_size, config.vocab_size)

    def logprobs(self, ids: list[int], temperature: float = 1.0, **inputs: Tensor) -> tuple[Tensor, float]:
        """Exact log-probabilities [T, V], and how far from them another path in the model's type may be.

        ``inputs`` are further arguments of the model, such as those for images.
        """
        tokens = torch.tensor([ids])
        with torch.no_grad():
            plain = (self._model(tokens, **inputs).logits[0] / temperature).log_softmax(-1)
            with in_float64():
                exact = (self._exact(tokens, **inputs).logits[0] / temperature).log_softmax(-1)
        return exact, allowance(plain, exact, max(self._terms, len(ids)))

    def errors(self, ids: list[int], found: list[float], temperature: float = 1.0, **inputs: Tensor) -> Tensor:
        """Errors of the log-probabilities of the last tokens of ``ids``, as multiples of the allowed one."""
        exact, allowed = self.logprobs(ids, temperature, **inputs)
        start = len(ids) - len(found)
        chosen = exact[range(start - 1, len(ids) - 1), ids[start:]]
        return (torch.tensor(found, dtype=torch.float64) - chosen).abs() / allowed
