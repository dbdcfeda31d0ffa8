"""Parts of tensors on disk: any box of one can be read, from however many parts of however many ranks."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_async.trainer.checkpoints import MOMENT, Part, StoredShards, write_shards

pytestmark = pytest.mark.usefixtures("one_rank")

WHOLE = torch.arange(28.0).reshape(7, 4)
BOXES = [
    (slice(0, 1), slice(0, 3)),
    (slice(0, 1), slice(3, 4)),
    (slice(1, 5), slice(0, 4)),
    (slice(5, 7), slice(0, 2)),
    (slice(5, 7), slice(2, 4)),
]


def stored(parts: list[Part], folder: Path) -> StoredShards:
    write_shards(parts, folder, None)
    return StoredShards(folder)


def boxes(name: str, whole: Tensor) -> list[Part]:
    return [Part(name, box, whole[box].clone()) for box in BOXES]


def test_a_rank_may_hold_several_boxes_of_a_tensor(tmp_path: Path) -> None:
    scalar = Part("steps", (), torch.tensor(3))
    shards = stored([scalar, *boxes("a", WHOLE), *boxes("b", -WHOLE)], tmp_path)
    assert shards.sizes == {"steps": (), "a": WHOLE.shape, "b": WHOLE.shape}
    assert shards.whole("a").equal(WHOLE) and shards.whole("b").equal(-WHOLE) and int(shards.whole("steps")) == 3
    where = (slice(0, 6), slice(2, 4))
    part = torch.zeros(6, 2, dtype=torch.bfloat16)
    shards.read_into(part, "a", where, WHOLE.shape)
    assert part.equal(WHOLE[where].bfloat16())


def test_an_expert_can_be_read_out_of_a_stack_by_its_own_name(tmp_path: Path) -> None:
    names = {"gate_up_proj": (3, 8, 5), "down_proj": (3, 5, 4)}
    stacks = {name: torch.arange(float(math.prod(size))).reshape(size) for name, size in names.items()}
    parts = []
    for name, whole in stacks.items():
        for kind, sign in (("", 1), (f"{MOMENT}exp_avg", -1)):
            for experts in (slice(0, 2), slice(2, 3)):
                place = experts, *(slice(0, size) for size in whole.shape[1:])
                parts.append(Part(f"mlp.experts.{name}{kind}", place, sign * whole[experts]))
    shards = stored(parts, tmp_path)
    up = torch.zeros(4, 5)
    shards.read_into(up, "mlp.experts.2.up_proj.weight")
    assert up.equal(stacks["gate_up_proj"][2, 4:])
    rows = torch.zeros(2, 3)
    shards.read_into(rows, "mlp.experts.1.down_proj.weight|exp_avg", (slice(3, 5), slice(1, 4)), (5, 4))
    assert rows.equal(-stacks["down_proj"][1, 3:5, 1:4])
    with pytest.raises(ValueError, match=r"2\.up_proj\.weight"):
        shards.read_into(torch.zeros(8, 5), "mlp.experts.2.up_proj.weight")
    with pytest.raises(KeyError):
        shards.read_into(up, "mlp.experts.3.up_proj.weight")


def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    shards = stored(boxes("a", WHOLE)[:2] + boxes("a", WHOLE)[3:], tmp_path)
    with pytest.raises(ValueError, match=r"\ba\b.* 16 "):
        shards.whole("a")
    with pytest.raises(ValueError, match=r"\ba\b.*\[7, 4\].*\[4, 7\]"):
        shards.read_into(torch.zeros(4, 7), "a")
    rest = torch.zeros(2, 4)
    shards.read_into(rest, "a", (slice(5, 7), slice(0, 4)), (7, 4))
    assert rest.equal(WHOLE[5:])
