"""The way of weights on a device of Python's (tests/support/python_device.py), beside the same on the CPU.

``python -m tests.contracts.device.rehearsal MODEL_FOLDER`` prints a line of JSON per part. It is a process of its own,
since the device changes torch.
"""

import asyncio
import dataclasses
import functools
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_async.configs.schema.algorithm import AlgorithmConfig, ImitationConfig, ObservationsConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig, WeightSyncConfig
from rl_async.errors import EngineError, EngineLost
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.embedded.core import EngineCore, Sequence, uncaptured
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.torch_shared import give_back
from rl_async.trainer.actor_critic import Models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.attention import merged, merged_by_kernel
from rl_async.trainer.backend import LossFn, OutputName, Outputs
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors, collate, tree_calls
from rl_async.trainer.update import update
from rl_async.weight_sync.buckets import SUMS, Bucket, Piece, deltas, numbered, unpack, verify
from rl_async.weight_sync.coordinator import Fleet, TakeTurns, Weights
from rl_async.weight_sync.layout import TensorSpec, fsdp2, slices, whole
from rl_async.weight_sync.protocol import InitInfo, SyncReport, UpdateInfo, of_worker
from rl_async.weight_sync.receiver import Assembler, RetainedBuckets, WeightReceiver
from rl_async.weight_sync.reshard import Gathering, PointToPoint
from rl_async.weight_sync.sender import Needs, Outlet, RankShards
from rl_async.weight_sync.transports import TRANSPORTS, Transport
from tests.conftest import VOCAB, make_rows
from tests.support import python_device
from tests.support.batches import shared_rows
from tests.support.python_device import DEVICE, NAME, SCALARS, held, moved, reserved, sent, waited
from tests.support.weights import shards_of
from tests.unit.weight_sync.fleet_engines import Directory, Engine, eventually, make_fleet

# Engines and a trainer's rank take turns on the device: what is on it when, in updates that end well or do not.
#
# The engines are those of the unit tests, which have no memory on the device; so all that is there is the trainer's.


class HandedOver:
    """Both ends of a group. The sender gives each of its ``receivers`` every bucket."""

    buckets: ClassVar[dict[str, deque[Bucket]]] = {}  # under way, by group

    def __init__(self, group: str, receivers: int = 1) -> None:
        self._queue, self._receivers = self.buckets.setdefault(group, deque()), receivers
        self._info = InitInfo(backend="nccl", group_name=group)

    def init_info(self, member: int) -> InitInfo:
        return self._info

    def connect(self) -> None: ...

    def stage(self, bucket: Bucket) -> UpdateInfo:
        self._queue.extend([bucket] * self._receivers)
        return bucket.info

    def send(self, bucket: Bucket) -> None: ...

    def unstage(self) -> None: ...

    def close(self) -> None:
        self._queue.clear()

    def receive(self, info: UpdateInfo) -> Tensor:
        return self._queue.popleft().data


def install_transport() -> None:
    """Have it in the place of NCCL."""
    TRANSPORTS["nccl"] = Transport(
        lambda setup: HandedOver(setup.group_name, len(setup.workers)), lambda info: HandedOver(info.group_name)
    )


BUCKET = 16384
# The name of an engine that does not share the trainer's device.
OWN_DEVICES = "apart"
SCENARIOS: dict[str, tuple[dict[str, Exception], dict[str, Exception]]] = {  # faults of two engines
    "well": ({}, {}),
    "one dies loading": ({}, {"update 2": EngineLost("gone")}),
    "one fails loading once": ({}, {"update 2": EngineError("again")}),
    "one dies before it is verified": ({}, {"finish": EngineLost("gone")}),
    "one dies on waking": ({}, {"wake kv_cache": EngineLost("gone")}),
    "both die": ({"update 1": EngineLost("gone")}, {"update 2": EngineLost("gone")}),
}


class Measuring(Engine):
    """Notes what the trainer has on the device, in bytes beside ``empty``, and the most that came to the host."""

    def __init__(self, empty: int) -> None:
        super().__init__()
        self._empty = empty
        self.loading: list[int] = []  # on the device, after each bucket of the last update
        self.to_host = 0  # largest tensor, while that update was under way
        self.waking: int | None = None  # of the device, and not given back, when the cache woke

    async def start_update(self, staged: bool = False) -> None:
        self.updates, self.loading = 0, []
        await super().start_update(staged)

    async def update(self, info: UpdateInfo) -> None:
        await super().update(info)
        self.loading.append(held() - self._empty)
        self.to_host = max(moved, default=0)

    async def wake(self, tags: Any) -> None:
        if "kv_cache" in tags:
            self.waking = reserved() - self._empty
        await super().wake(tags)


class Starting(Directory):
    """A registry to which a third engine comes when it has become empty, as if the launcher had replaced one."""

    def __init__(self, empty: int, **engines: Engine) -> None:
        super().__init__(**engines)
        self._empty = empty
        self.third = Measuring(empty)
        self.at_start: int | None = None  # of the device, and not given back, when it came

    async def remove_engine(self, engine_id: str, reason: str) -> None:
        await super().remove_engine(engine_id, reason)
        if not self.records:
            self.at_start = reserved() - self._empty
            self.add("third", self.third)


class Updater:
    """What phases need of a coordinator, over a fleet on this thread's loop."""

    def __init__(self, fleet: Fleet, runner: asyncio.Runner) -> None:
        self._fleet, self._runner = fleet, runner

    def suspend(self) -> None:
        self._runner.run(self._fleet.suspend())

    def publish(self, version: Version, weights: Weights, *, wake: bool = True) -> SyncReport:
        return self._runner.run(self._fleet.publish(version, weights, wake=wake))

    def defer_late(self) -> None:
        raise AssertionError("no device is lent")


def all_turns(there: Fsdp2Backend) -> dict[str, Any]:
    """What each of SCENARIOS finds."""
    return {name: turn(there, *faults) for name, faults in SCENARIOS.items()}


def turn(there: Fsdp2Backend, *faults: dict[str, Exception]) -> dict[str, Any]:
    """The publication at the start of a run, and that after a step, in which the engines have these faults."""
    there.sleep()
    give_back(torch.device(there.device))
    empty = reserved()
    there.wake()
    HandedOver.buckets.clear()
    sync = WeightSyncConfig(way="nccl", bucket_bytes=BUCKET)
    outlet = Outlet(0, sync, "127.0.0.1", 60.0, there.device)
    shards = RankShards(outlet, {})
    one, other = Measuring(empty), Measuring(empty)
    directory = Starting(empty, one=one, other=other)
    fleet = make_fleet(directory, "nccl", engine_wait_s=30, sync=sync, shares=lambda r: r.engine_id != OWN_DEVICES)

    # The bytes that came to the host while the trainer fell asleep, in each publication.
    asleep: list[int] = []

    def offload(engines_sleep: bool) -> None:
        moved.clear()
        outlet.keep(stays=engines_sleep)
        there.sleep()
        if engines_sleep:
            outlet.rest(there.sharded_weights().held)
        give_back(torch.device(there.device))
        asleep.append(sum(moved))
        moved.clear()

    with asyncio.Runner() as runner:
        phase = TakeTurns(Updater(fleet, runner), lambda: None, there.wake, offload)
        outlet.offer(there.sharded_weights())
        phase.after_train(Version(0, 0), shards)
        at_start = max(one.loading + other.loading)
        phase.before_train()
        one.faults, other.faults = (dict(some) for some in faults)
        weights = there.sharded_weights()
        copy = sum(tensor.nbytes for tensor in weights.held.values())
        outlet.offer(weights)
        del weights
        # A name for its tensors would keep them on the device. Its buffers sleep, too.
        slept = sum(tensor.nbytes for tensor in itertools.chain(tensors_of(there), there.model.buffers()))
        report = phase.after_train(Version(0, 1), shards)
        after, travelled = held() - empty, list(moved)
        late = Measuring(empty)
        runner.run(catch_up(fleet, directory, "late", late))
        # The trainer wakes, and a step changes its weights, before an engine comes that has devices of its own.
        phase.before_train()
        for tensor in there.sharded_weights().held.values():
            tensor.neg_()
        later = Measuring(empty)
        runner.run(catch_up(fleet, directory, OWN_DEVICES, later))
        runner.run(fleet.close())
    shards.close()
    for tensor in there.sharded_weights().held.values():
        tensor.neg_()
    served = directory.third if one.dead else one
    return {
        "engines": sorted(report.engines),
        "at the start": at_start,
        "loading": [nbytes / copy for nbytes in one.loading],
        "to the host": one.to_host,
        "waking": [engine.waking for engine in (one, other) if engine.waking is not None],
        "replaced": directory.at_start,
        "after": after,
        "beyond masters and moments": asleep[-1] - slept,
        "while weights travel": (max(travelled, default=0), len(travelled)),
        "late as others": late.weights == later.weights == served.weights,
    }


async def catch_up(fleet: Fleet, directory: Directory, name: str, engine: Engine) -> None:
    """Add an engine, and let the fleet bring it up to date."""
    directory.add(name, engine)
    running = asyncio.create_task(fleet.keep_caught_up())
    await eventually(lambda: name in dict(directory.confirmed))
    running.cancel()


REHEARSAL_BUCKET = 4096
MINIS = 2
HEAD_DIM = 8
STEPS = 8
# Corrections before and within the loss, each with all terms that read numbers per token.
ALGORITHMS = [
    AlgorithmConfig(
        correction=correction,
        entropy_coef=0.01,
        observations=ObservationsConfig(coef=0.1),
        imitation=ImitationConfig(coef=0.1),
    )
    for correction in ("decoupled_geo_rs_token_tis", "bypass_ppo_clip")
]

Told = dict[str, Any]


def likelihood(batch: Tensors, _: int, outputs: Outputs) -> Tensor:
    assert outputs.logprobs is not None
    return -torch.where(batch.mask, outputs.logprobs, 0.0).mean()


def step(backend: Fsdp2Backend, seed: int) -> tuple[float, float]:
    batch = collate(make_rows(seed)[:8], device=backend.device)
    return backend.step([batch], functools.partial(likelihood, batch))


def tensors_of(backend: Fsdp2Backend) -> Iterator[Tensor]:
    """The parameters and the optimizer's tensors, but for the counts of its steps."""
    assert backend.optimizer is not None
    yield from backend.model.parameters()
    yield from (t for state in backend.optimizer.state.values() for t in state.values() if t.dim())


def places(backend: Fsdp2Backend) -> list[str]:
    return sorted({tensor.device.type for tensor in tensors_of(backend)})


def buckets_of(backend: Fsdp2Backend, device: str) -> list[Bucket]:
    wire = PointToPoint(dist.HashStore(), device=backend.device)
    return Gathering(wire, 0, REHEARSAL_BUCKET, 60.0, device).buckets(backend.sharded_weights())


def as_held(backend: Fsdp2Backend, buckets: Items[Bucket]) -> bool:
    """Whether the buckets have the bits of the weights that the backend, of one rank, holds."""
    held = {name: tensor.cpu().view(-1) for (name, _), tensor in backend.sharded_weights().held.items()}
    pieces = contents(buckets)
    return {piece.name for piece in pieces} == held.keys() and all(
        piece.data.equal(held[piece.name][piece.start : piece.start + piece.data.numel()]) for piece in pieces
    )


def contents(buckets: Items[Bucket]) -> list[Piece]:
    return [piece for bucket in buckets for piece in unpack(bucket.data.cpu(), bucket.info)]


def training(there: Fsdp2Backend, here: Fsdp2Backend) -> Told:
    """Forward passes and steps, asleep and awake in between."""
    batch, same = (collate(make_rows(0)[:8], device=backend.device) for backend in (there, here))
    logprobs, expected = there.forward(batch).logprobs, here.forward(same).logprobs
    assert logprobs is not None and expected is not None
    moved.clear()
    steps = [(step(there, 0), step(here, 0))]
    largest = max(moved, default=0)
    awake = places(there)
    there.sleep()
    asleep = places(there)
    there.wake()
    steps.append((step(there, 1), step(here, 1)))
    return {
        "device": logprobs.device.type,
        "difference": float((logprobs.cpu() - expected)[same.mask].abs().max()),
        "steps": steps,
        "scalars_only": largest <= SCALARS,
        "places": [awake, asleep, places(there)],
    }


def updating(there: Fsdp2Backend, here: Fsdp2Backend) -> Told:
    """Whole updates of mini-batches in two epochs: what is copied within losses, and in passes that are not the
    first."""
    within, later, metrics = list[int](), list[int](), []
    for algorithm in ALGORITHMS:
        config = RunConfig(
            model=ModelConfig(path="none"),
            data=DataConfig(path="none"),
            algorithm=algorithm,
            trainer=TrainerConfig(minibatches=MINIS, epochs=2, max_tokens_per_microbatch=64),
        )
        rows = make_rows(0)
        headers = [row.header() for row in rows]
        for backend in (there, here):
            passes = itertools.count(1)

            def step(
                batches: Items[Tensors],
                loss_fn: LossFn,
                requested: frozenset[OutputName] = frozenset(),
                backend: Fsdp2Backend = backend,
                passes: Iterator[int] = passes,
            ) -> tuple[float, float]:
                def watched(number: int, outputs: Outputs) -> Tensor:
                    moved.clear()
                    sent.clear()
                    loss = loss_fn(number, outputs)
                    within.extend([*moved, *sent])
                    return loss

                sent.clear()
                stepped = Fsdp2Backend.step(backend, batches, watched, requested)
                if next(passes) > MINIS:
                    later.extend(size for size in sent if size > SCALARS)
                return stepped

            backend.step = step  # type: ignore[method-assign]
            plan = plan_batch(headers, 0, config, 1, backend.row_cost)
            batch = Batch(0, headers, plan, {row.key: row for row in rows})
            metrics.append(update(Models(backend), batch, build(config), config, kl_coef=0.1).metrics)
            del backend.step  # type: ignore[attr-defined]
    losses = [[found[name] for name in ("loss/policy", "loss/grad_norm")] for found in metrics]
    return {"within": within, "later": later, "losses": list(zip(losses[::2], losses[1::2], strict=True))}


def prefixes() -> Told:
    """Attention over a tree of prefixes with a GPU's kernel, beside that with a CPU's, and in float64."""
    batch, draw = shared_rows(VOCAB), torch.Generator().manual_seed(0)
    assert batch.tree is not None
    shapes = [(len(batch.tree.places), heads, HEAD_DIM) for heads in (4, 2, 2, 4)]
    *given, seen = (torch.randn(shape, generator=draw) for shape in shapes)

    def attended(attend: Callable[..., Tensor], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        calls = tree_calls(batch.tree, torch.device(device))
        parts = [x.to(device, dtype).requires_grad_() for x in given]
        out = attend(*parts, calls, HEAD_DIM**-0.5)
        return [x.cpu().double() for x in (out, *torch.autograd.grad(out, parts, seen.to(out)))]

    exact = attended(merged, "cpu", torch.float64)
    there, here = attended(merged_by_kernel, DEVICE), attended(merged, "cpu")
    return {
        "difference": [float((a - b).abs().max()) for a, b in zip(there, here, strict=True)],
        "sizes": [float(x.abs().max()) for x in exact],
        "nested": max(len(calls.over) for calls in [tree_calls(batch.tree, torch.device("cpu"))]),
    }


def gathering(there: Fsdp2Backend) -> Told:
    """Buckets filled and checksummed on the device, awake and asleep."""
    moved.clear()
    filled = buckets_of(there, there.device)
    largest = max(moved, default=0)
    there.sleep()
    asleep = buckets_of(there, there.device)
    there.wake()
    for bucket in filled:
        verify(bucket.data.cpu(), bucket.info)  # the host finds the same checksum
    return {
        "devices": sorted({bucket.data.device.type for bucket in (*filled, *asleep)}),
        "kinds": sorted({bucket.info.checksum.startswith(SUMS) for bucket in filled}),
        "scalars_only": largest <= SCALARS,
        "as_held": as_held(there, filled),
        "same_asleep": [bucket.info for bucket in filled] == [bucket.info for bucket in asleep],
    }


def updates(there: Fsdp2Backend) -> Told:
    """Deltas between versions, encoded on the device, and an engine's copy that is patched with them there."""
    versions = []
    for number in range(3):
        versions.append(list(numbered(buckets_of(there, there.device), Version(0, number), "keep")))
        with torch.no_grad():  # little changes, so that a delta is smaller
            for parameter in there.model.parameters():
                parameter._local_tensor.view(-1)[:3] += 1.0
    retained, right, kinds = RetainedBuckets(), [], []
    for number, version in enumerate(versions):
        sent = list(deltas(version, versions[number - 1], f"0.{number - 1}")) if number else version
        host = [bucket.offloaded() for bucket in version]
        again = list(deltas(host, [b.offloaded() for b in versions[number - 1]], f"0.{number - 1}")) if number else host
        right += [torch.equal(a.data.cpu(), b.data) for a, b in zip(sent, again, strict=True)]
        for bucket, full in zip(sent, version, strict=True):
            data = retained.put(bucket.data, bucket.info)
            right += [data.device.type == NAME, torch.equal(data.cpu(), full.data.cpu())]
            kinds.append(bucket.info.kind)
        kept: list[Tensor] = []
        retained.load(f"0.{number}", lambda pieces, kept=kept: kept.extend(piece.data for piece in pieces))
        right += [all(a.equal(b.data) and not a.device.index for a, b in zip(kept, contents(version), strict=True))]
    return {"right": all(right), "kinds": sorted(set(kinds))}


def received(shards: RankShards, needs: Items[Needs | None]) -> list[dict[str, Tensor]]:
    """What the loader of each worker gets of a publication."""
    shipment = shards.shipment(1, needs)
    found: list[dict[str, Tensor]] = [{} for _ in needs]
    loads = [Assembler(lambda named, to=to: to.update((n, t.clone()) for n, t in named)) for to in found]  # type: ignore[misc]
    receivers = [WeightReceiver(load, DEVICE) for load in loads]
    for worker, receiver in enumerate(receivers):
        receiver.init(of_worker(shipment.init_info(0), worker))
    for number in range(shipment.count):
        info = shipment.stage(number)
        for worker, receiver in enumerate(receivers):
            receiver.update(of_worker(info, worker))
    return found


def same(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return found.keys() == right.keys() and all(found[name].cpu().equal(tensor) for name, tensor in right.items())


def sending(there: Fsdp2Backend) -> Told:
    """Shards that their rank sends from the device, to a worker that takes everything and two that take halves."""
    sync = WeightSyncConfig(way="nccl", bucket_bytes=REHEARSAL_BUCKET)
    outlet = Outlet(0, sync, "127.0.0.1", 60.0, there.device)
    shards = RankShards(outlet, {})
    held = there.sharded_weights()
    outlet.offer(held)
    upper = {n: (((0, -(-spec.shape[0] // 2)), *whole(spec.shape)[1:]),) for n, spec in held.layout.tensors.items()}
    lower = {
        n: (((upper[n][0][0][1], spec.shape[0]), *whole(spec.shape)[1:]),) if spec.shape[0] > 1 else ()
        for n, spec in held.layout.tensors.items()
    }
    needs: list[Needs | None] = [None, upper, lower]
    moved.clear()
    shards.begin(Version(0, 1), "no")
    found = received(shards, needs)
    shards.seal()
    largest = max(moved, default=0)
    outlet.offer(held)
    outlet.keep(stays=True)
    there.sleep()
    shards.begin(Version(0, 2), "no")
    asleep, homes = shards.shipment(1, needs[:1]), []
    kept: dict[str, Tensor] = {}
    loads = Assembler(lambda named: kept.update((name, tensor.clone()) for name, tensor in named))
    for number in range(asleep.count):
        info = asleep.stage(number)
        asleep.send(number)
        bucket = HandedOver.buckets[asleep.init_info(0).group_name].popleft()
        homes.append((bucket.data.device.type, bucket.device.type))
        verify(bucket.data, info)
        loads(unpack(bucket.data, info))
        if number == 1:
            asleep.leave()
    there.wake()
    right = {name: tensor.cpu() for (name, _), tensor in there.sharded_weights().held.items()}
    parts = [(found[0], right), (kept, right)]
    for got, of in zip(found[1:], (upper, lower), strict=True):
        some = {name: slices(boxes[0], whole(right[name].shape)) for name, boxes in of.items() if boxes}
        parts.append(({n: t[some[n]] for n, t in got.items()}, {n: right[n][part] for n, part in some.items()}))
    return {
        "devices": sorted({tensor.device.type for of in found for tensor in of.values()}),
        "scalars_only": largest <= SCALARS,
        "same": [same(*pair) for pair in parts],
        "asleep": [homes[1], *set(homes[2:])],
    }


def over_the_host() -> Told:
    """Shards in float32 that travel in bfloat16 by a transport which is on the host."""
    masters = {"a": torch.randn(64, 8, device=DEVICE), "b": torch.randn(33, device=DEVICE)}
    layout = fsdp2({name: TensorSpec(tuple(t.shape), "bfloat16") for name, t in masters.items()}, 1)
    outlet = Outlet(0, WeightSyncConfig(way="ipc", bucket_bytes=1 << 20), "127.0.0.1", 60.0, "cpu")
    shards = RankShards(outlet, {})
    moved.clear()
    outlet.offer(shards_of(layout, 0, masters))
    shards.begin(Version(0, 1), "no")
    [found] = received(shards, [None])
    shards.seal()
    shards.close()
    largest = max(moved)
    right = {name: tensor.cpu().bfloat16() for name, tensor in masters.items()}
    return {"largest": largest, "right": max(tensor.nbytes for tensor in right.values()), "same": same(found, right)}


def taking_turns(there: Fsdp2Backend) -> Told:
    """What the engines are given when they share the device."""
    given: list[Bucket] = []

    class Updater:
        def publish(self, version: Version, buckets: Items[Bucket]) -> SyncReport:
            given.extend(buckets)
            given_places.append(places(there))
            return SyncReport(
                version=version, seconds=0, waiting_seconds=0, pause_seconds=0, nbytes=0, engines=[], failures=[]
            )

        def suspend(self) -> None:
            pass

    given_places: list[list[str]] = []
    phase = TakeTurns(Updater(), lambda: None, there.wake, lambda engines_sleep: there.sleep())
    phase.before_train()
    phase.after_train(Version(0, 1), buckets_of(there, there.device))
    there.wake()
    for bucket in given:
        verify(bucket.data, bucket.info)
    return {
        "bytes": sorted({bucket.data.device.type for bucket in given}),
        "home": sorted({bucket.device.type for bucket in given}),
        "trainer": given_places,
    }


def sampled(engine: EngineThread, seed: int) -> list[list[int]]:
    """Greedy answers, so that the device's own generator does not matter."""
    done: list[Sequence] = []
    greedy, ready = Sampling(temperature=0.0), torch.futures.Future[None]()

    def deliver(sequence: Sequence) -> None:
        done.append(sequence)
        if len(done) == 4:
            ready.set_result(None)

    prompts = [list(range(3 + seed, 8 + seed + i)) for i in range(4)]
    engine.submit(*(Sequence(str(i), p, greedy, 6, frozenset(), None, deliver) for i, p in enumerate(prompts)))
    ready.wait()
    return [sequence.tokens for sequence in sorted(done, key=lambda sequence: sequence.request_id)]


def generating(folder: str, there: Fsdp2Backend) -> Told:
    """An engine on the device: it loads buckets from there, samples, sleeps without its weights, and loads again."""
    buckets = buckets_of(there, there.device)
    answers = []
    for device, capture in ((DEVICE, None), (DEVICE, uncaptured), ("cpu", None)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        model.tie_weights()  # of which moving to a device in Python makes two
        engine = EngineThread(EngineCore(model, max_batch=4, max_length=64, capture=capture), on_crash=print)
        own = [dataclasses.replace(bucket, data=bucket.data.to(device)) for bucket in buckets]
        found = [sampled(engine, 0)]
        for level in (1, 2):
            engine.pause("keep").result()
            engine.sleep(level).result()
            engine.wake([]).result()
            for bucket in own:
                engine.load_weights(unpack(bucket.data, bucket.info))
            engine.set_version(f"0.{level}").result()
            engine.resume().result()
            found.append(sampled(engine, 0))
        answers.append(found)
        engine.stop()
    return {"same": answers[0] == answers[1] == answers[2], "changed": answers[0][0] != answers[0][1]}


def decoding(folder: str) -> Told:
    """What steps of four running rows copy between host and device, and how often the host waits for the device."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
    model.tie_weights()
    told: Told = {"bytes": STEPS * [4 * 2 * torch.float64.itemsize]}
    for name, capture in (("eager", None), ("static", uncaptured)):
        core = EngineCore(model, max_batch=4, max_length=64, capture=capture)
        for number in range(4):
            prompt = list(range(3 + number, 9))
            core.add(Sequence(str(number), prompt, Sampling(), 2 * STEPS, frozenset(), None, lambda _: None))
        for _ in range(4):
            core.step()
        for counted in (moved, waited, sent):
            counted.clear()
        for _ in range(STEPS):
            core.step()
        told[name] = {"moved": list(moved), "waited": len(waited), "sent": len(sent)}
    return told


def mixing() -> Told:
    """What the device refuses, without which the rest would show nothing."""
    refused = []
    for operation in (
        lambda t: t + torch.ones(4),
        lambda t: torch.cat([t, torch.ones(4)]),
        lambda t: t[torch.ones(2).long()],
    ):
        try:
            operation(torch.zeros(4, device=DEVICE))
        except RuntimeError as error:
            refused.append("on the host" in str(error))
    return {"refused": refused}


def main(folder: str) -> None:
    """Run all parts, in the order in which each needs those before it."""
    torch.set_num_threads(1)
    python_device.install()
    install_transport()
    dist.init_process_group(f"cpu:gloo,{NAME}:fake", store=dist.HashStore(), rank=0, world_size=1)
    config = TrainerConfig(learning_rate=1e-2, minibatches=1)
    there, here = (Fsdp2Backend(folder, "float32", device, config) for device in (DEVICE, "cpu"))
    parts = {
        "mixing": mixing,
        "training": lambda: training(there, here),
        "updating": lambda: updating(there, here),
        "prefixes": prefixes,
        "gathering": lambda: gathering(there),
        "generating": lambda: generating(folder, there),
        "decoding": lambda: decoding(folder),
        "taking turns": lambda: taking_turns(there),
        "updates": lambda: updates(there),
        "sending": lambda: sending(there),
        "over the host": over_the_host,
        "turns over shards": lambda: all_turns(there),
    }
    for name, part in parts.items():
        print(json.dumps({"part": name} | part()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
