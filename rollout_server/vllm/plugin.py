"""vLLM plugin with our weight transport: ``register`` is an entry point of the group ``vllm.general_plugins``.

rl-async is installed beside vLLM (scripts/install vllm), which calls ``register`` in each of its processes. Start
vLLM with ``--weight-transfer-config '{"backend": "rl_async"}'``, as ``__main__.py`` does.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.nn.functional import linear

from rl_async.concurrency import gather_or_cancel
from rl_async.configs.engines import WEIGHT_TRANSFER
from rl_async.rollout_server.vllm import versions

# Once a worker has failed, the answers of the others are awaited for this time.
REST_S = 60.0
log = logging.getLogger("rl_async.vllm")


def register() -> None:
    """Register the transport with vLLM and apply our patches, once per process.

    Raises RuntimeError for a vLLM without a name that they need.
    """
    import vllm
    from vllm.platforms import current_platform

    versions.require_all(vllm.__version__, cpu=current_platform.is_cpu())

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rl_async.rollout_server.vllm import adapters, int8

    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER, "rl_async.rollout_server.vllm.slices", "WeightTransfer"
        )
    if not versions.lacking(versions.TOKEN_VERSIONS):
        _report_versions_in_every_part()
    _read_every_answer()
    _ask_every_copy()
    _take_expanded_prompts()
    _process_images_with_pillow()
    int8.register()
    adapters.register()
    if current_platform.is_cpu():
        _keep_weights_unpacked()
        _pack_experts_again()
        if not versions.lacking(versions.DIVIDED_EXPERTS_ON_CPU):
            _compute_own_experts_alone()
        _check_guesses_at_the_temperature()
        _gather_tokens_of_copies()


def _keep_weights_unpacked() -> None:
    """Stop vLLM from packing weight matrices on a CPU.

    vLLM would multiply with packed copies that weight updates do not reach. It would answer 200, adopt the new version,
    and sample with a mixture of old and new weights.
    """
    from vllm.model_executor.layers import utils

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = unpacked


def _pack_experts_again() -> None:
    """Have vLLM pack a mixture's experts for its CPU kernel in every weight update, not only at its start.

    The kernel requires packed weights, and an update would overwrite them with unpacked ones. A vLLM whose kernel
    cannot pack again refuses to load such a model.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if missing := versions.lacking(versions.EXPERTS_ON_CPU):

        def refuse(*_: Any) -> None:
            raise RuntimeError(
                f"this vLLM has no {', '.join(missing)}, without which no update reaches experts on a CPU"
            )

        UnquantizedFusedMoEMethod.process_weights_after_loading = refuse
        return
    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def packed(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        # vLLM itself packs when it makes the kernel.
        again = method.moe_kernel is not None
        set_up(method, layer, w13, w2)
        if again:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = packed


def _compute_own_experts_alone() -> None:
    """Give vLLM's CPU kernel for mixtures the local indices of a rank's experts, and other ranks' experts no weight.

    With ``--enable-expert-parallel`` vLLM passes it the global indices of experts, which it takes for local ones: it
    reads and writes out of bounds.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    compute = CPUUnquantizedExperts.apply

    def of_this_rank(experts: Any, **named: Any) -> None:
        if named["expert_map"] is not None:
            # The map has -1 for experts of other ranks.
            places = named["expert_map"][named["topk_ids"]]
            named["topk_weights"] = torch.where(places < 0, 0.0, named["topk_weights"])
            named["topk_ids"] = places.clamp(min=0)
        compute(experts, **named)

    CPUUnquantizedExperts.apply = of_this_rank


def _gather_tokens_of_copies() -> None:
    """Give vLLM's CPU build the collectives by which data-parallel copies bring their tokens to a mixture's experts.

    It has them for GPUs only. Copies may have different numbers of tokens, ``sizes``.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(group: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(group, one, dim, sizes) for one in input_]
        sizes = sizes or [len(input_)] * group.world_size
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(group: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> Any:
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group.device_group)
        return total.split(sizes or len(total) // group.world_size)[group.rank_in_group]

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def _check_guesses_at_the_temperature() -> None:
    """Have vLLM check guessed tokens (``--speculative-config``) at their requests' temperatures on a CPU.

    Its kernel writes the temperatures into a converted copy, so that tokens are sampled at whatever the memory held.
    """
    from vllm.v1.sample import rejection_sampler

    def expanded(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        """Return the values of the requests, x [B], for each of their tokens, [num_tokens]."""
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        each = torch.repeat_interleave(x, counts, output_size=num_tokens)
        return each.masked_fill(each == replace_from, replace_to)

    rejection_sampler.expand_batch_to_tokens = expanded


class QueuesReadToTheEnd(list[Any]):
    """The queues for the answers of an executor's workers. If iteration stops early, the remaining answers are read.

    If an answer does not arrive in time, the executor counts as failed and refuses further calls.
    """

    def __init__(self, executor: Any) -> None:
        super().__init__(executor.response_mqs)
        self._executor = executor
        for queue in self:
            queue.dequeue = self._failing(queue.dequeue)

    def __iter__(self) -> Iterator[Any]:
        queues = super().__iter__()
        try:
            yield from queues
        finally:
            for queue in queues:
                if self._executor.is_failed:
                    break
                # A timeout has been logged and has failed the executor.
                with suppress(TimeoutError):
                    queue.dequeue(timeout=REST_S)

    def _failing(self, dequeue: Callable[..., Any]) -> Callable[..., Any]:
        def dequeue_or_fail(*arguments: Any, **named: Any) -> Any:
            try:
                return dequeue(*arguments, **named)
            except TimeoutError:
                log.error("a worker of this engine has not answered in time; the engine takes no further calls")
                self._executor.is_failed = True
                raise

        return dequeue_or_fail


def _read_every_answer() -> None:
    """Have vLLM read the answers of all workers of an engine, even after one of them failed.

    vLLM stops at the first failure. The answers of the remaining workers would then be taken for those to the next
    call, and a weight bucket would count as loaded by workers that have not yet read it.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    start = MultiprocExecutor._init_executor

    def started(executor: Any) -> None:
        start(executor)
        executor.response_mqs = QueuesReadToTheEnd(executor)

    MultiprocExecutor._init_executor = started


def _report_versions_in_every_part() -> None:
    """Attach the weight versions of the tokens to every part of a stream.

    vLLM itself only attaches them to the last part. If that part were lost with the engine, the tokens before it would
    have no version and could not be trained on.
    """
    from vllm.v1.engine.output_processor import RequestState

    make = RequestState._new_completion_output

    def with_versions(state: Any, *arguments: Any, **named: Any) -> Any:
        output = make(state, *arguments, **named)
        output.weight_versions = state._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions


def _ask_every_copy() -> None:
    """Have ``/collective_rpc`` return the results of all data-parallel copies' workers, not of the first copy's."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    async def of_all(client: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        call = "collective_rpc", method, timeout, args, kwargs
        asked = [client._call_utility_async(*call, engine=engine) for engine in client.core_engines]
        return [result for results in await gather_or_cancel(*asked) for result in results]

    DPLBAsyncMPClient.collective_rpc_async = of_all


def _take_expanded_prompts() -> None:
    """Have vLLM take prompts of token ids as they are, with each image's tokens, as the trainer will see them.

    vLLM would take the first of these tokens for the mark of a chat template, and put all of them in its place. Text
    with marks, as in its warm-up, is still expanded.
    """
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor
    from vllm.renderers.base import BaseRenderer

    apply, process = BaseMultiModalProcessor._apply_prompt_updates, BaseRenderer._process_tokens_async

    def unless_expanded(processor: Any, ids: list[int], updates: Any) -> tuple[list[int], Any]:
        found = processor._find_mm_placeholders(ids, updates)
        if all(len(found.get(kind, ())) == len(items) for kind, items in updates.items()):
            return ids, found
        return apply(processor, ids, updates)

    async def unchanged(renderer: Any, prompt: Any, **named: Any) -> Any:
        made = await process(renderer, prompt, **named)
        ids = prompt["prompt_token_ids"]
        # A prompt of token ids alone has no text.
        if "prompt" not in prompt and made["type"] == "multimodal":
            places = made["mm_placeholders"].get("image", ())
            # Places are those of the ids that vLLM made, which may be more than the request's.
            if made["prompt_token_ids"] != ids or any(
                ids[p.offset + p.length - 1 : p.offset + p.length + 1] == [ids[p.offset]] * 2 for p in places
            ):
                raise ValueError(
                    "token_ids lacks the tokens that this engine makes of the images; expand prompts with the "
                    "processor of the model that it serves, and give it no --mm-processor-kwargs"
                )
        return made

    BaseMultiModalProcessor._apply_prompt_updates = unless_expanded
    BaseRenderer._process_tokens_async = unchanged


def _process_images_with_pillow() -> None:
    """Have vLLM resample images with Pillow, as the trainer does; torchvision's results differ in the last bits."""
    from transformers import AutoImageProcessor

    load = AutoImageProcessor.from_pretrained

    def with_pillow(*arguments: Any, **named: Any) -> Any:
        return load(*arguments, **(named | {"backend": "pil"}))

    AutoImageProcessor.from_pretrained = with_pillow  # type: ignore[method-assign]
