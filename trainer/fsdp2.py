"""The FSDP2 backend: a model with its heads under ``fully_shard``, on gloo or NCCL, on any number of ranks."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from rl_async.configs.schema import TrainerConfig
from rl_async.errors import TrainingDiverged
from rl_async.trainer.backend import LossFn, Outputs, Want
from rl_async.trainer.batching import Tensors
from rl_async.trainer.cell import lone_ranks
from rl_async.trainer.heads import MODEL_FOLDER, VALUE_HEAD_FILE, Head, load_headed, shard
from rl_async.trainer.schedule import learning_rate_factor
from rl_async.trainer.work import work_of

FULL_ON_RANK0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
OPTIMIZER_FILE = "optimizer.safetensors"


class Fsdp2Backend:
    """See ``backend.Backend``. Without a trainer config the model is frozen: a reference.

    Master weights are float32; with dtype bfloat16 they are cast for compute, gradients are reduced in float32.
    ``config`` is what the optimizer of this model follows; a critic's differs from the policy's.
    """

    def __init__(self, path: str, dtype: str, device: str, config: TrainerConfig | None, head: Head = "policy") -> None:
        self.device, self.path, self.config = device, path, config
        self.dtype, self.cell = getattr(torch, dtype), lone_ranks()
        model = load_headed(path, head, device, self.dtype)
        self.hf_config = model.lm.config
        self.work = work_of(self.hf_config, padded=not model.packs)
        mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
        self.model = shard(model.to(device), mesh, self.dtype)
        self.optimizer: torch.optim.AdamW | None = None
        self.schedule: torch.optim.lr_scheduler.LambdaLR | None = None
        if config is None:
            self.model.requires_grad_(False)
        else:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(),
                lr=config.learning_rate,
                betas=(config.beta1, config.beta2),
                weight_decay=config.weight_decay,
            )
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate_factor(config))

    def forward(self, batch: Tensors, wants: frozenset[Want] = frozenset()) -> Outputs:
        with torch.no_grad():
            return self.model.outputs(batch, wants)

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, wants: frozenset[Want] = frozenset()
    ) -> tuple[float, float]:
        assert self.optimizer is not None and self.schedule is not None and self.config is not None
        world = dist.get_world_size()
        total = 0.0
        for number, batch in enumerate(batches):
            self.model.set_requires_gradient_sync(number == len(batches) - 1)
            loss = loss_fn(number, self.model.outputs(batch, wants))
            total += loss.item()
            (loss * world).backward()  # FSDP averages over ranks; the loss is already divided by the global count
        norm = _full(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)).item()
        finite = torch.tensor([float(total == total and abs(total) != float("inf"))])
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite.item() or norm != norm or norm == float("inf"):
            self.optimizer.zero_grad()
            raise TrainingDiverged(f"loss {total} and gradient norm {norm} must be finite")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total, norm

    def export(self) -> Iterator[tuple[str, Tensor]]:
        tied = self.hf_config.tie_word_embeddings
        for name, parameter in self.model.lm.named_parameters():  # a value head is none of the engines' business
            if not (tied and name == "lm_head.weight"):
                yield name, _full(parameter.detach()).to(self.dtype)

    def save(self, folder: Path) -> None:
        assert self.optimizer is not None and self.schedule is not None
        model: dict[str, Any] = get_model_state_dict(self.model.lm, options=FULL_ON_RANK0)
        head: dict[str, Any] = {}
        if self.model.value_head is not None:
            head = get_model_state_dict(self.model.value_head, options=FULL_ON_RANK0)
        state = self._optimizer_state()
        if dist.get_rank() != 0:
            return
        if self.hf_config.tie_word_embeddings:
            model.pop("lm_head.weight", None)
        target = folder / MODEL_FOLDER
        target.mkdir()
        save_file({k: v.contiguous() for k, v in model.items()}, target / "model.safetensors", {"format": "pt"})
        self.hf_config.save_pretrained(target)
        if self.model.has_logits:
            AutoTokenizer.from_pretrained(self.path).save_pretrained(target)
        if head:  # beside the model's folder, out of which engines load every tensor that they find
            save_file(head, folder / VALUE_HEAD_FILE)
        save_file(state | {"schedule|steps": torch.tensor(self.schedule.last_epoch)}, folder / OPTIMIZER_FILE)

    def _optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's tensors as ``parameter|name``, whole, on rank 0. A collective."""
        assert self.optimizer is not None
        if not self.optimizer.state:  # no step yet, and asking would make one up
            return {}
        optimizer: Any = get_optimizer_state_dict(self.model, self.optimizer, options=FULL_ON_RANK0)
        entries = optimizer.get("state", {}).items()  # other ranks get nothing at all
        return {f"{name}|{key}": value for name, entry in entries for key, value in entry.items()}

    def load(self, folder: Path) -> None:
        assert self.optimizer is not None and self.schedule is not None
        rank0 = dist.get_rank() == 0
        model: dict[str, Any] = load_file(folder / MODEL_FOLDER / "model.safetensors") if rank0 else {}
        if rank0 and self.model.has_logits and self.hf_config.tie_word_embeddings:
            model["lm_head.weight"] = model["model.embed_tokens.weight"]
        set_model_state_dict(self.model.lm, model, options=FROM_RANK0)
        if self.model.value_head is not None:
            head: dict[str, Any] = load_file(folder / VALUE_HEAD_FILE) if rank0 else {}
            set_model_state_dict(self.model.value_head, head, options=FROM_RANK0)
        flat = load_file(folder / OPTIMIZER_FILE)
        steps = int(flat.pop("schedule|steps"))
        if flat:
            self._set_optimizer_state(flat)
        self.schedule.last_epoch = steps - 1
        self.schedule.step()

    def _set_optimizer_state(self, flat: dict[str, Tensor]) -> None:
        assert self.optimizer is not None
        state: dict[str, Any] = {}
        for key, value in flat.items():
            name, _, part = key.partition("|")
            state.setdefault(name, {})[part] = value
        groups: Any = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
        set_optimizer_state_dict(
            self.model,
            self.optimizer,
            {"state": state if dist.get_rank() == 0 else {}, "param_groups": groups},
            options=FROM_RANK0,
        )

    def sleep(self) -> None:
        self._move_optimizer("cpu")

    def wake(self) -> None:
        self._move_optimizer(self.device)

    def _move_optimizer(self, device: str) -> None:
        if self.device == "cpu" or self.optimizer is None:
            return  # it already lives in host memory
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(device)


def _full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; a collective for sharded ones."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
