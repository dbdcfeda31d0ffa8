"""Builds the parts of a trainer rank from the run's config and hands them to ``train``.

In come a run's folder and the queue's address, or the recorded trajectories of another run; ``__main__.py`` calls
``run_rank`` once its arguments are parsed, since importing this takes seconds.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from transformers import AutoConfig

from rl_async import tracing
from rl_async.configs.derived import adapter_way, engine_traits, resolve_transport, sends_shards
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import UserError
from rl_async.files import drop_torn_lines
from rl_async.model_files import weights_name
from rl_async.process.http_auth import run_token
from rl_async.process.http_server import exposed
from rl_async.process.private_folder import RENDEZVOUS, require_private
from rl_async.process.run_files import beat, read_budget
from rl_async.rollout_server.pool import connect
from rl_async.trainer.actor_critic import Models, build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.algorithms.losses import KlController
from rl_async.trainer.batches import QueueSource, RecordedSource
from rl_async.trainer.checkpoints import (
    WRITE_S,
    Saver,
    drop_unfinished,
    folder_of,
    load_checkpoint,
    newest_whole,
    read_state,
)
from rl_async.trainer.families import text_of
from rl_async.trainer.monitoring import EngineLoads, Guard, MemoryWatch, QueueDepth, RankCollector, StepProfiler
from rl_async.trainer.publishing import (
    PROMPT_TOKENS,
    Canaries,
    EnginePublisher,
    EngineUpdates,
    GatheredWeights,
    NoEngines,
    Publisher,
    ShardedByRank,
    WatchedPublisher,
    WeightSource,
)
from rl_async.trainer.ranks import StopRequest, as_rank_0, ranks_joined
from rl_async.trainer.records import Evaluator, Recorder, next_lineage, require_newest
from rl_async.trainer.trackers import Tracking
from rl_async.trainer.train import Run, train
from rl_async.transfer_queue.auth import client_keys
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient
from rl_async.userload import load_user_object
from rl_async.weight_sync import sender
from rl_async.weight_sync.coordinator import IdleCoordinator, WeightCoordinator, build_phase, shares_devices
from rl_async.weight_sync.reshard import Gathering, PointToPoint
from rl_async.weight_sync.sender import Outlet
from rl_async.weight_sync.transports import bucket_device

log = logging.getLogger("rl_async.trainer")
# Trains to the end, or returns False if the run was asked to stop and is saved: ``train``, or a user's own.
Loop = Callable[[Run], bool]

# How much of the deadline of an engine's update another rank has for an answer. A transfer gives up after half of it.
RANKS_SHARE = 0.75


def run_rank(folder: Path, queue: str | None, replay: Path | None, *, host: str, resume: bool) -> None:
    """Train as one rank, from the transfer queue at ``queue`` or else on the trajectories of the run ``replay``.

    Raises UserError, RanksLost if another rank is lost, and other RlAsyncErrors, which a restart does not mend; and
    SystemExit if it was asked to stop before the last step.
    """
    stop = StopRequest()
    stop.listen()
    config = load_resolved(folder / "config.yaml")
    beat(folder, int(os.environ.get("RANK", "0")), 0, "starting")
    role = f"trainer-{os.environ.get('RANK', '0')}"
    with ranks_joined(config, folder) as (device, store), tracing.traced(config.tracking.otlp_endpoint, folder, role):
        memory = MemoryWatch(device, read_budget(folder).of(role))
        with memory.explained():
            models, kl = build_models(config, device), KlController(config.algorithm.kl)
            start = _restore(folder, models, kl, resume)
            trainer, profile, rank = config.trainer, config.trainer.profile, dist.get_rank()
            run = Run(
                config=config,
                folder=folder,
                lineage=start.lineage,
                start_step=start.step,
                models=models,
                algorithm=build(config),
                source=RecordedSource((replay or folder) / "trajectories"),
                publisher=NoEngines(),
                guard=Guard.of(config),
                kl=kl,
                saver=Saver(
                    folder / "checkpoints",
                    trainer.keep_checkpoints,
                    max(WRITE_S, trainer.collective_timeout_s),
                    start.step,
                    lambda: require_newest(folder, start.lineage),
                ),
                stop=stop,
                recorder=Recorder(
                    folder,
                    start.lineage,
                    rank,
                    is_recorder=models.policy.data_parallel.is_recorder,
                    keep=trainer.keep_trajectories,
                ),
                profiler=StepProfiler(folder, rank, profile.steps if profile else (), models.policy.device),
                memory=memory,
                tracking=Tracking(config, folder) if rank == 0 else None,
            )
            collector = RankCollector(folder, run.rank, lambda: run.tracking.latest if run.tracking else {})
            with exposed(config.tracking.prometheus, folder, "trainer", role, collector):
                loop: Loop = load_user_object(trainer.loop, "trainer.loop") if trainer.loop else train
                if queue is None:
                    done = loop(run)
                else:
                    done = _train_from_queue(run, loop, queue, host, start.snapshot if resume else None, store)
    if not done:
        sys.exit(stop.code)


class _Start(NamedTuple):
    """Where this rank begins; ``snapshot`` is the queue's, from the checkpoint, or empty."""

    lineage: int
    step: int
    snapshot: bytes


def _restore(folder: Path, models: Models, kl: KlController, resume: bool) -> _Start:
    """Take a new lineage and, if resuming, load the newest whole checkpoint, which may be missing."""
    root = folder / "checkpoints"
    chosen = torch.tensor([0, -1])
    if dist.get_rank() == 0:
        newest = None
        if resume:
            # No rank appends to these files before the broadcast below.
            for name in ("trained.jsonl", "refused.jsonl"):
                drop_torn_lines(folder / name)
            drop_unfinished(root)
            newest = newest_whole(root)
        chosen = torch.tensor([next_lineage(folder, resume), -1 if newest is None else read_state(newest).step])
    dist.broadcast(chosen, 0)
    lineage, step = chosen.tolist()
    if step < 0:
        return _Start(lineage, 0, b"")
    state, snapshot = load_checkpoint(folder_of(root, step), models.trained())
    kl.coef = state.kl_coef
    log.info("resuming at step %d as lineage %d", state.step, lineage)
    return _Start(lineage, state.step, snapshot)


def _train_from_queue(run: Run, loop: Loop, address: str, host: str, snapshot: bytes | None, store: dist.Store) -> bool:
    """Train with ``loop`` on the batches of the queue at ``address``; False if it was asked to stop.

    A resumed run first rolls the queue back to ``snapshot``. ``store`` is that of all ranks.
    """
    config = run.config
    keys = client_keys(config, run.folder, "trainer")
    with SyncQueueClient(address, role="trainer", name=f"trainer-{run.rank}", keys=keys, lineage=run.lineage) as queue:
        run.source = QueueSource(queue, config.trainer.batch_timeout_s, run.recorder.refused)
        if run.rank != 0 and config.rollout.replay:
            return loop(run)
        if run.rank != 0:
            with _weight_source(run, host, store) as source:
                run.publisher = _watched(run, _publisher(run, IdleCoordinator(as_rank_0), source), None)
                return loop(run)
        if snapshot is not None:
            resumed = queue.resume(run.start_step, run.lineage, snapshot)
            log.info("the queue kept %d groups and admits %d again", resumed.kept, resumed.readmitted)
        run.depth = QueueDepth(queue)
        if config.rollout.replay:
            run.publisher = NoEngines(lambda version: queue.publish(version, []))
            done = loop(run)
            if done:
                queue.finish()
            return done
        token = run_token(run.folder, "engines")
        run.engines = EngineLoads(queue.engines, lambda record: connect(record.kind, record.url, token=token))
        if config.data.eval_path:
            run.evaluations = Evaluator(queue, config.eval.every, run.recorder.evaluated, solved=config.eval.solved)
        with (
            _weight_source(run, host, store) as source,
            WeightCoordinator(
                lambda: QueueClient(address, role="weights", name="coordinator", keys=keys, lineage=run.lineage),
                lambda record: connect(record.kind, record.url, lineage=run.lineage, token=token),
                _resolved_sync(run),
                config.rollout.start_timeout_s,
                host,
                EngineUpdates(run.folder),
                shares_devices(config.mode),
                _meeting(config, host),
                as_rank_0,
            ) as coordinator,
        ):
            run.publisher = _watched(run, _publisher(run, coordinator, source), queue)
            done = loop(run)
            # A run that was asked to stop is not over for the queue, and waits for no engine.
            if done:
                queue.finish()
                coordinator.finish()
            return done


def _resolved_sync(run: Run) -> WeightSyncConfig:
    """Return section ``weight_sync`` with the transport and the folder filled in."""
    sync = run.config.weight_sync
    folder = Path(sync.folder) / run.config.name / "weights" if sync.folder else run.folder / "weights"
    return msgspec.structs.replace(sync, way=(resolve_transport(run.config), *sync.options), folder=str(folder))


def _publisher(run: Run, publisher: WeightCoordinator | IdleCoordinator, source: WeightSource) -> EnginePublisher:
    def offload(engines_sleep: bool) -> None:
        source.keep(stays=engines_sleep)
        run.models.sleep()
        # Merging adapters again would take the host long.
        if engines_sleep and run.config.trainer.lora is None:
            source.rest(run.models.policy)

    phase = build_phase(
        run.config.mode,
        publisher,
        lends=run.config.trainer.lend_devices,
        agree=as_rank_0,
        barrier=dist.barrier,
        onload=run.models.wake,
        offload=offload,
    )
    return EnginePublisher(phase, source)


def _meeting(config: RunConfig, host: str) -> Path | None:
    """Return the private folder where trainer ranks met, if engines can meet them there, too.

    Returns None if engines are on other machines, or of a kind that asks for an address.
    """
    file = os.environ.get(RENDEZVOUS)
    here = host == "127.0.0.1" and all(traits.meets_in_files for traits in engine_traits(config).values())
    if not file or not here:
        return None
    try:
        require_private(Path(file).parent)
    # The user may have set the variable to a file elsewhere.
    except UserError as error:
        log.warning("engines meet the trainer at a port: %s", error)
        return None
    return Path(file).parent


@contextmanager
def _weight_source(run: Run, host: str, store: dist.Store) -> Iterator[WeightSource]:
    """Yield the source of published weights on this rank; ``store`` is that of all ranks."""
    config, sync = run.config, _resolved_sync(run)
    timeout_s = config.trainer.collective_timeout_s
    place = bucket_device(resolve_transport(config), run.models.policy.device)
    if not sends_shards(config):
        wire = PointToPoint(dist.PrefixStore("gathering", store), device=run.models.policy.device)
        gathering = Gathering(wire, run.rank, sync.bucket, timeout_s, place)
        way = adapter_way(config)
        lora = config.trainer.lora if way != "merge" else None
        yield GatheredWeights(gathering, lora, weights_name(Path(config.model.path)) if way == "load" else "")
        return
    outlet = Outlet(run.rank, sync, host, timeout_s, place, _meeting(config, host))
    token = run_token(run.folder, "ranks")
    if run.rank != 0:
        with sender.followed(outlet, run.rank, host, token, store, timeout_s):
            yield ShardedByRank(outlet, None)
        return
    answer_s = RANKS_SHARE * min(sync.timeout_s, sync.sync_timeout_s)
    with sender.led(outlet, token, store, dist.get_world_size(), answer_s, timeout_s) as shards:
        yield ShardedByRank(outlet, shards)


# Tokens that each engine samples for a comparison: enough to average, and sampled in a moment.
CANARY_TOKENS = 32


def _watched(run: Run, publisher: Publisher, queue: SyncQueueClient | None) -> Publisher:
    """Have the publisher compare log-probabilities with the engines unless that is off. Rank 0 has the queue."""
    config = run.config
    mismatch, temperature = config.weight_sync.mismatch, config.rollout.temperature
    if mismatch.action == "off":
        return publisher
    canaries = None
    if queue is not None:
        token = run_token(run.folder, "engines")
        pictures = run.models.policy.pictures
        canaries = Canaries(
            queue.engines,
            lambda record: connect(record.kind, record.url, token=token),
            vocabulary=text_of(AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)).vocab_size,
            tokens=min(CANARY_TOKENS, config.rollout.max_model_len - PROMPT_TOKENS),
            temperature=temperature,
            timeout_s=config.weight_sync.timeout_s,
            image_token=None if pictures is None else pictures.image_token,
        )
    return WatchedPublisher(publisher, canaries, mismatch, temperature)
