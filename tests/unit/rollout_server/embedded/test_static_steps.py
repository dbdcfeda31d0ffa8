"""Static decode steps compute what today's steps do, can be captured, and keep the engine's contract."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3ForCausalLM

from rl_async.configs.engines import most_static_steps
from rl_async.messages import Sampling
from rl_async.model_files import MIXERS
from rl_async.rollout_server.embedded.core import Capture, EngineCore, Sequence, StaticSteps, Step, uncaptured
from rl_async.rollout_server.embedded.engine_thread import quantize_layers
from tests.unit.rollout_server.embedded.test_core import assert_as_plain, model, sequences
from tests.unit.rollout_server.embedded.test_families import ALIKE, KINDS, peaked

__all__ = ["model"]
REFUSED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
FAMILIES = [
    pytest.param(kind, more, id=f"{kind}-{n}", marks=[pytest.mark.nightly] * ((kind, more) in ALIKE))
    for n, (kind, more) in enumerate(KINDS)
    if kind not in MIXERS and "num_experts" not in more
]


class Recording(TorchDispatchMode):
    """Stands in for a CUDA graph: records the operations of a step with the tensors they read and write.

    ``replay`` runs the same operations on the same memory, without any Python of the step. Operations whose sizes or
    results the host would have to know, and tensors made of host data, are refused, as capturing refuses them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.replays = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        masks = any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:2]))
        # The shape of an index operation depends on data only if it selects by a mask.
        dynamic = masks if function in INDEXING else any(tag in function.tags for tag in REFUSED)
        if dynamic or function is torch.ops.aten.lift_fresh.default:
            raise AssertionError(f"a captured step cannot do {function}")
        found = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, tree_leaves(found)))
        return found

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, made in self.calls:
            for old, new in zip(made, tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    assert old.shape == new.shape and old.stride() == new.stride()
                    old.copy_(new)


def recorded(made: list[Recording]) -> Capture:
    """Return a Capture that adds its recordings to ``made``. Recording runs the step, so its first replay does not."""

    def capture(step: Step) -> Step:
        recording = Recording()
        with recording:
            step()
        made.append(recording)
        ran = iter([True])

        def replay() -> None:
            if not next(ran, False):
                recording.replay()

        return replay

    return capture


def finish(core: EngineCore, todo: list[Sequence]) -> None:
    for sequence in todo:
        core.add(sequence)
    for _ in range(1000):
        core.step()
        if not core.unfinished:
            return
    raise AssertionError("sequences were left")


def seeded(count: int, seed: int) -> list[Sequence]:
    """Sequences of all kinds of samplers, each with a seed; there are alternatives to none, nor a grammar."""
    todo = sequences(count, seed)
    for n, sequence in enumerate(todo):
        sequence.seed = n
        if n % 3 == 0:
            sequence.sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01)
    return todo


def answers(todo: list[Sequence]) -> list[list[int]]:
    return [sequence.sampled for sequence in todo]


@pytest.mark.parametrize("kind", ["uncaptured", "recorded"])
def test_static_steps_sample_what_other_steps_do(model: Qwen3ForCausalLM, kind: str) -> None:
    made: list[Recording] = []
    capture = recorded(made) if kind == "recorded" else uncaptured
    cores = [EngineCore(model, max_batch=12, max_length=64, capture=given) for given in (None, capture)]
    found = []
    for core in cores:
        todo = seeded(40, seed=1)
        finish(core, todo)
        found.append(answers(todo))
        assert_as_plain(model, [s for s in todo if not s.sampling.truncating])
        assert {s.finish_reason for s in todo} == {"stop", "length"}
    assert found[0] == found[1]
    # Surplus tokens of rows that ended one step before are not counted.
    assert cores[1].sampled_tokens == cores[0].sampled_tokens == sum(map(len, found[0]))
    if kind == "recorded":
        assert sum(recording.replays for recording in made) > 5 * len(made) > 0


@pytest.mark.parametrize(("kind", "more"), FAMILIES)
def test_steps_of_each_family_can_be_captured(kind: str, more: dict[str, Any]) -> None:
    model, made = peaked(kind, more), list[Recording]()
    core = EngineCore(model, max_batch=4, max_length=64, capture=recorded(made))
    todo = sequences(6, seed=1)
    for sequence in todo:
        sequence.max_tokens, sequence.stop_token_ids = 12, frozenset()
    finish(core, todo)
    assert_as_plain(model, todo)
    assert sum(recording.replays for recording in made) > len(made) > 0


def test_quantised_layers_can_be_captured(model: Qwen3ForCausalLM) -> None:
    served, found = copy.deepcopy(model), list[list[list[int]]]()
    quantize_layers(served, "int8")
    made: list[Recording] = []
    for capture in (None, recorded(made)):
        todo = seeded(6, seed=2)
        finish(EngineCore(served, max_batch=8, max_length=64, capture=capture), todo)
        found.append(answers(todo))
    assert found[0] == found[1] and made


def test_rows_that_need_the_host_between_tokens_use_other_steps(model: Qwen3ForCausalLM) -> None:
    """Others follow them with static steps again, and random numbers go on where they were."""
    found = []
    for capture in (None, uncaptured):
        core = EngineCore(model, max_batch=12, max_length=64, capture=capture)
        todo = seeded(12, seed=3)
        for sequence in todo[4:6]:
            sequence.alternatives = 3
        for sequence in todo[:4]:
            core.add(sequence)
        for _ in range(4):
            core.step()
        finish(core, todo[4:])
        found.append((answers(todo), [len(sequence.likeliest) for sequence in todo[4:6]]))
        assert found[-1][1] == [len(sequence.sampled) for sequence in todo[4:6]]
    assert found[0] == found[1]


class Columnless:
    """A sampler of one kind of rows, which takes the first token."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def adopt(self, other: "Columnless") -> None:
        """Keep nothing of the other."""

    def draw_numbers(self, drawn: Tensor) -> None:
        """Draw nothing."""

    def distribution(self, logits: Tensor) -> Tensor:
        return logits

    def choose(self, logprobs: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(logprobs), dtype=torch.int64), logprobs[:, 0]


def test_captured_steps_are_few_and_the_oldest_are_dropped() -> None:
    """Of three rows and 100 tokens: 1, 2 and 3 rows, 64 and 100 keys, two kinds of samplers."""
    captured: list[tuple[int, int]] = []
    shapes: list[tuple[int, int]] = []

    def capture(step: Step) -> Step:
        step()
        captured.append(shapes[-1])
        return step

    def compute(last: Tensor, positions: Tensor, view: int) -> Tensor:
        shapes.append((len(last), view))
        return torch.zeros(len(last), 2)

    steps = StaticSteps(3, 100, torch.device("cpu"), capture)

    def run(kind: str) -> None:
        for count in (1, 2, 3):
            for longest in (1, 65):
                steps.place(torch.zeros(count, dtype=torch.int64), [0] * count)
                steps.launch(Columnless(kind), longest, 100, compute)()  # type: ignore[arg-type]

    for kind in ("sampled", "sampled", "greedy", "greedy", "sampled"):
        run(kind)
    each = [(rows, keys) for rows in (1, 2, 3) for keys in (64, 100)]
    assert captured == each * 2 and len(captured) == most_static_steps(3, 100)
    # A third kind takes the places of the first six.
    run("both")
    run("both")
    assert captured == each * 3 and len(steps._captured) == most_static_steps(3, 100)
    run("greedy")
    assert captured == each * 3
    run("sampled")
    assert captured == each * 4


def test_preempted_and_aborted_sequences_keep_each_token_that_was_sampled(model: Qwen3ForCausalLM) -> None:
    found = []
    for capture in (None, uncaptured):
        core = EngineCore(model, max_batch=12, max_length=64, cache_bytes=120 * 256 * 4, capture=capture)
        todo = seeded(20, seed=4)
        for sequence in todo:
            core.add(sequence)
        for iteration in range(1000):
            core.step()
            if iteration == 3:
                core.settle()
                core.preempt()
            if iteration == 5:
                core.settle()
                core.free_cache()
            if not core.unfinished:
                break
        assert core.preemptions > 0
        found.append(answers(todo))
    assert found[0] == found[1]
    core = EngineCore(model, max_batch=4, max_length=64, capture=uncaptured)
    todo = seeded(4, seed=5)
    for sequence in todo:
        sequence.max_tokens, sequence.stop_token_ids = 30, frozenset()
        core.add(sequence)
    for _ in range(6):
        core.step()
    core.settle()
    core.abort("2")
    assert todo[2].finish_reason == "abort" and len(todo[2].sampled) == 7
    finish(core, [])
    assert [len(sequence.sampled) for sequence in todo] == [30, 30, 7, 30]


def test_captured_steps_read_new_weights_and_tokens_carry_their_version(model: Qwen3ForCausalLM) -> None:
    served, made = copy.deepcopy(model), list[Recording]()
    core = EngineCore(served, max_batch=4, max_length=64, capture=recorded(made))
    core.version = "0.0"
    [sequence] = sequences(1, seed=1)
    sequence.tokens, sequence.prompt_length = sequence.tokens[:4], 4
    sequence.sampling, sequence.max_tokens, sequence.stop_token_ids = Sampling(), 30, frozenset()
    core.add(sequence)
    for _ in range(12):
        core.step()
    core.settle()
    before, captured = len(sequence.sampled), len(made)
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.mul_(1.1)
    core.weights_changed()
    core.preempt()
    core.version = "0.1"
    finish(core, [])
    assert sequence.runs == [("0.0", 0), ("0.1", before)]
    assert len(made) == captured and made[0].replays > before
    old, new = copy.copy(sequence), copy.copy(sequence)
    old.tokens, old.logprobs = sequence.tokens[: 4 + before], sequence.logprobs[:before]
    new.prompt_length, new.logprobs = 4 + before, sequence.logprobs[before:]
    assert_as_plain(model, [old])
    assert_as_plain(served, [new])
