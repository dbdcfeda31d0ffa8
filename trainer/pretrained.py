"""The part of a tensor that a rank holds, and the same part in a safetensors file."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rl_async.errors import UserError
from rl_async.model_files import weight_files


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the part of ``tensor`` that this rank holds, as a view, and its place in the whole. Not a collective."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    # This is the protocol of torch.distributed.checkpoint.
    (chunk,) = tensor.__create_chunk_list__()
    places = zip(chunk.offsets, chunk.sizes, strict=True)
    return tensor.to_local(), tuple(slice(offset, offset + size) for offset, size in places)


def read_part(path: Path | str, name: str, part: tuple[slice, ...]) -> Tensor:
    """Read a part of a tensor of a safetensors file: a slice of each dimension. Maps no more than that part's pages,
    until the result is dropped."""
    with safe_open(path, "pt") as file:
        return file.get_slice(name)[part] if part else file.get_tensor(name)


# The number of missing tensors that an error lists.
NAMED = 3


# An MXFP4 tensor is two in a file: pairs of 4-bit numbers, [experts, rows, groups, GROUP / 2], and a power of two for
# each group, [experts, rows, groups] (OCP Microscaling Formats, version 1.0). The model's is their product, transposed.
BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32


class StoredWeights:
    """The tensors of a Hugging Face folder's safetensors files, those of MXFP4 in float32.

    No file stays open: the pages of a mapped file count as this process's memory. ``key`` is the config's, for errors.
    Raises UserError if the files are missing.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for path in self._paths():
            try:
                with safe_open(path, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  # not a mapping
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                        self._files[name] = path
            except (OSError, SafetensorError) as error:
                raise UserError(f"{key}: cannot read {path}: {error}") from error
        for whole in [name.removesuffix(SCALES) for name in self.shapes if name.endswith(SCALES)]:
            if whole + BLOCKS in self.shapes:
                experts, rows, groups = self.shapes.pop(whole + SCALES)
                del self.shapes[whole + BLOCKS]
                self.shapes[whole] = (experts, groups * GROUP, rows)

    @property
    def files(self) -> list[Path]:
        """The files that have the tensors: a folder may hold others, such as Mistral's consolidated weights."""
        return sorted(set(self._files.values()))

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Read a tensor, or the ``part`` of it, in its stored type.

        Raises UserError for an unknown name.
        """
        if name + BLOCKS in self._files:
            blocks, scales = (read_part(self._files[name + k], name + k, part[:1]) for k in (BLOCKS, SCALES))
            return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[(slice(None), *part[1:])]
        if name not in self._files:
            raise UserError(f"{self.key}: the weights in {self.folder} have no tensor {name}")
        return read_part(self._files[name], name, part)

    def _paths(self) -> list[Path]:
        try:
            return weight_files(self.folder)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.key}: {error}") from error


def skeleton(kind: Any, config: Any) -> Any:
    """Build a float32 model in evaluation mode whose parameters have no memory; its buffers are computed as ever.

    ``kind`` is an auto class of Transformers, which chooses the implementation of attention. Raises ValueError if
    Transformers has no such model for the config.
    """
    with _without_memory():
        model = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model.eval()


@contextmanager
def _without_memory() -> Iterator[None]:
    """Put the parameters of modules that are made meanwhile on the meta device, before they are initialised."""

    def to_meta(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> Any:
        # Tied parameters stay one.
        if parameter.is_meta:
            return None
        return torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


class _Converted(NamedTuple):
    """Tensors that Transformers makes of stored ones under other names.

    ``target`` is the first of them; ``stored`` has the stored names in their order, by the converter's pattern.
    """

    target: str
    stored: Mapping[str, Sequence[str]]
    converter: WeightConverter

    @property
    def stacks(self) -> bool:
        """Whether each row of the target, such as an expert, is made of the stored tensors of that number alone."""
        first, *others = self.converter.operations
        return (
            len(self.converter.target_patterns) == 1
            and isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(_keeps_rows(operation) for operation in others)
        )

    @property
    def targets(self) -> list[str]:
        """All tensors that it makes."""
        first, *_ = patterns = self.converter.target_patterns
        return [self.target.replace(first, pattern) for pattern in patterns]


def _keeps_rows(operation: object) -> bool:
    if type(operation) is Concatenate:
        return operation.dim > 0
    return type(operation) is Transpose and min(operation.dim0, operation.dim1) > 0


class Pretrained:
    """Plans how the tensors of a model are read from a folder. Reads shapes only, until ``fill``.

    Raises UserError if a parameter of ``model`` is not stored, or stored in another shape.
    """

    def __init__(self, model: Any, stored: StoredWeights) -> None:
        self._model, self._stored = model, stored
        quantization = getattr(model.config, "quantization_config", None)
        if quantization is not None:
            # What is trained, published and saved is not quantized any more.
            del model.config.quantization_config
        named = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        # Tied tensors get the same name.
        self._names = {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}
        self._plain: dict[str, str] = {}
        self._converted: list[_Converted] = []
        self._plan(named)
        self._check(named)

    @property
    def renamed(self) -> dict[str, str]:
        """The stored names, by the model's, of tensors that are stored under another name."""
        return {target: name for target, name in self._plain.items() if target != name}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's part of each stored tensor into that of ``tensors``, sharded or whole, by its name in the
        model as it was built. Not a collective."""
        with torch.no_grad():
            for target, name in self._plain.items():
                local, part = own_part(tensors[target])
                if local.numel():
                    local.copy_(self._stored.read(name, part))
            for converted in self._converted:
                (self._fill_rows if converted.stacks else self._fill_whole)(converted, tensors)

    def _plan(self, named: dict[str, Tensor]) -> None:
        """Find the model's tensor for each stored one, by the rules of Transformers."""
        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = self._model.base_model_prefix
        collected: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(self._stored.shapes, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, named)
            if target not in named and name in named:
                # A rule that is meant for other models' names renamed it.
                target, pattern = rename_source_key(name, [], [], prefix, named)
            if target not in named:
                # It belongs to a head that this model lacks.
                continue
            if pattern is not None:
                collected[target][pattern].append(name)
            elif self._names[target] == target or self._names[target] not in self._plain:
                self._plain[self._names[target]] = name
        for target, stored in collected.items():
            self._converted.append(_Converted(target, stored, by_pattern[next(iter(stored))]))

    def _check(self, named: Mapping[str, Tensor]) -> None:
        made = {name for converted in self._converted for name in converted.targets} | self._plain.keys()
        parameters = {name for name, tensor in named.items() if isinstance(tensor, torch.nn.Parameter)}
        missing = sorted(name for name in parameters if self._names[name] not in made)
        where = f"{self._stored.key}: the weights in {self._stored.folder}"
        if missing:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise UserError(f"{where} lack {', '.join(missing[:NAMED])}{more}, which the model in config.json has")
        found = {target: self._stored.shapes[name] for target, name in self._plain.items()}
        for converted in self._converted:
            try:
                made_here = self._convert(converted, slice(None), self._without_memory)
            except RuntimeError as error:
                raise UserError(f"{where} have tensors that do not make up {converted.target}: {error}") from error
            found |= {target: tuple(whole.shape) for target, whole in made_here.items()}
        for target, shape in found.items():
            if shape != tuple(named[target].shape):
                raise UserError(f"{where} have {list(shape)} of {target}, and config.json {list(named[target].shape)}")

    def _without_memory(self, name: str) -> Tensor:
        return torch.empty(self._stored.shapes[name], device="meta")

    def _fill_rows(self, converted: _Converted, tensors: Mapping[str, Tensor]) -> None:
        """Make row after row of those that this rank holds. Of each it reads all, even if it holds only a part."""
        local, (rows, *rest) = own_part(tensors[converted.target])
        for row, number in enumerate(range(rows.start, rows.stop)):
            (made,) = self._convert(converted, slice(number, number + 1), self._stored.read).values()
            local[row].copy_(made[0][tuple(rest)])

    def _fill_whole(self, converted: _Converted, tensors: Mapping[str, Tensor]) -> None:
        for target, whole in self._convert(converted, slice(None), self._stored.read).items():
            local, part = own_part(tensors[self._names[target]])
            if local.numel():
                local.copy_(whole[part])

    def _convert(self, converted: _Converted, numbers: slice, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Make the targets from the stored tensors of these numbers."""
        converter = converted.converter
        tensors: dict[str, Any] = {
            pattern: [read(name) for name in names[numbers]] for pattern, names in converted.stored.items()
        }
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=converted.target,
                model=self._model,
                config=self._model.config,
                missing_keys=None,
            )
        first = converter.target_patterns[0]
        return {
            converted.target.replace(first, pattern): made[0] if isinstance(made, list) else made
            for pattern, made in tensors.items()
        }
