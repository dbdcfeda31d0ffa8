"""One rank that trains in bfloat16 and checks the precision of what is held and summed; started by test_training.py.

``python -m tests.contracts.trainer.workers.precision MODEL``.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.contracts.backends.models import ROWS, loss_of, micro_batches
from tests.support.rounding import assert_near, rounding
from tests.support.weights import whole_weights

RATE = 1e-6  # far below the last bit of a bfloat16 weight of 0.1, which is 5e-4


def gradients(backend: Fsdp2Backend, numbers: list[int]) -> dict[str, Tensor]:
    """The sum over these micro-batches of every rank's batch, whole; all of them in one go, as ``step`` does."""
    batches = micro_batches(range(ROWS))
    loss_fn = loss_of(batches)
    backend.add_gradients(
        [batches[number] for number in numbers],
        lambda at, outputs: loss_fn(numbers[at], outputs) / dist.get_world_size(),
        frozenset({"entropy"}),
    )
    found = {}
    for name, parameter in backend.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        found[name] = parameter.grad.full_tensor().clone()
        parameter.grad = None
    return found


def main() -> None:
    config = TrainerConfig(learning_rate=RATE, weight_decay=0.0, minibatches=1)
    backend = Fsdp2Backend(sys.argv[1], "bfloat16", "cpu", config)
    masters = {name: parameter.detach().full_tensor().clone() for name, parameter in backend.model.named_parameters()}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    seen: set[tuple[torch.dtype, bool]] = set()

    def look(layer: torch.nn.Module, inputs: object, output: Tensor) -> None:
        weight = layer.get_parameter("mlp.up_proj.weight").detach()
        hidden = output[0] if isinstance(output, tuple) else output
        name = next(name for name, part in backend.model.named_modules() if part is layer)
        expected = masters[f"{name}.mlp.up_proj.weight"].to(torch.bfloat16)
        seen.add((weight.dtype, weight.equal(expected)))
        assert hidden.dtype == torch.bfloat16

    # A module's own hooks run before FSDP's, which free the gathered weights.
    hooks = [layer.register_forward_hook(look, prepend=True) for layer in backend.model.lm.base_model.layers]
    each = [gradients(backend, [number]) for number in range(4)]
    for hook in hooks:
        hook.remove()
    assert seen == {(torch.bfloat16, True)}, "layers compute with the masters rounded to bfloat16"

    together = gradients(backend, [0, 1, 2, 3])
    for name, total in together.items():
        exact = torch.stack([part[name].double() for part in each]).sum(0)
        # Four gradients, each summed over two ranks.
        bound = rounding(torch.stack([part[name].double().abs() for part in each]).sum(0).max(), terms=8)
        assert_near(total, exact, bound, f"{name}, of which gradients are summed in float32")
        assert not total.equal(total.bfloat16().float()), f"{name}: and not rounded after"

    before = whole_weights(backend)
    batches = micro_batches(range(ROWS))
    backend.step(batches, loss_of(batches), frozenset({"entropy"}))
    assert backend.optimizer is not None
    moments = [t for state in backend.optimizer.state.values() for t in state.values()]
    assert len(moments) == 3 * len(masters) and {moment.dtype for moment in moments} == {torch.float32}
    after = whole_weights(backend)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    moved = unmoved = 0
    for name, parameter in backend.model.named_parameters():
        master = parameter.detach().full_tensor()
        sent = after[name.removeprefix("lm.")]
        assert sent.equal(master.to(torch.bfloat16)), f"{name}: engines get the masters rounded once"
        moved += int((master != masters[name]).sum())
        unmoved += int((sent == before[name.removeprefix("lm.")]).sum())
    total = sum(tensor.numel() for tensor in masters.values())
    assert moved > 0.5 * total, f"{moved} of {total} masters moved by a step that bfloat16 cannot hold"
    assert unmoved > 0.9 * total, f"{unmoved} of {total} rounded weights did not"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
