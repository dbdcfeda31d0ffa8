"""Builds the parts of a trainer rank from the run's config and hands them to ``train``."""

import functools
import logging
import os
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from transformers import AutoConfig

from rl_async.configs.derived.transport import resolve_transport
from rl_async.configs.load.loader import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.weight_sync import WeightSyncConfig
from rl_async.files import drop_torn_line
from rl_async.process.heartbeat import beat
from rl_async.rollout_server.connect import connect
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.algorithms.kl import KlController
from rl_async.trainer.batches import sources
from rl_async.trainer.checkpoints.folder import drop_unfinished, folder_of, load_checkpoint, newest_whole, read_state
from rl_async.trainer.checkpoints.saver import Saver
from rl_async.trainer.monitoring.evaluation import Evaluator
from rl_async.trainer.monitoring.guard import Guard
from rl_async.trainer.monitoring.queue_depth import QueueDepth
from rl_async.trainer.monitoring.ranks import ranks_joined
from rl_async.trainer.monitoring.records import next_lineage
from rl_async.trainer.monitoring.stopping import StopRequest
from rl_async.trainer.monitoring.trackers import Tracking
from rl_async.trainer.publishing.canaries import PROMPT_TOKENS, Canaries
from rl_async.trainer.publishing.mismatch import WatchedPublisher
from rl_async.trainer.publishing.publisher import EnginePublisher, NoEngines, Publisher
from rl_async.trainer.step.models import build_models
from rl_async.trainer.step.update import Models
from rl_async.trainer.train import Run, record_evaluation, train
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client.async_client import QueueClient
from rl_async.transfer_queue.client.sync_client import SyncQueueClient
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.phases import IdleCoordinator, build_phase
from rl_async.weight_sync.reshard.gather import Gathering
from rl_async.weight_sync.reshard.wire import PointToPoint, Wire

log = logging.getLogger("rl_async.trainer")


def run_rank(folder: Path, queue: str | None, replay: Path | None, *, host: str, resume: bool) -> None:
    """Train as one rank, from the transfer queue at ``queue`` or else on the trajectories of the run ``replay``.

    Raises UserError, RanksLost if another rank is lost, and other RlAsyncErrors that starting again does not mend.
    """
    stop = StopRequest()
    stop.listen()
    config = load_resolved(folder / "config.yaml")
    beat(folder, int(os.environ.get("RANK", "0")), 0, "starting")
    with ranks_joined(config, folder) as (device, store):
        run = _base_run(config, folder, replay or folder, build_models(config, device), stop)
        snapshot = _restore(run, resume)
        if queue is None:
            train(run)
        else:
            wire = PointToPoint(dist.PrefixStore("gathering", store), device=device)
            _train_from_queue(run, queue, host, snapshot if resume else None, wire)


def _base_run(config: RunConfig, folder: Path, recorded: Path, models: Models, stop: StopRequest) -> Run:
    trainer = config.trainer
    source = sources.RecordedSource(recorded / "trajectories")
    return Run(
        config=config,
        folder=folder,
        lineage=0,
        start_step=0,
        models=models,
        algorithm=build(config),
        source=source,
        publisher=NoEngines(),
        guard=Guard.of(config),
        kl=KlController(config.algorithm.kl),
        saver=Saver(folder / "checkpoints", trainer.keep_checkpoints, trainer.collective_timeout_s),
        stop=stop,
        tracking=Tracking(config, folder) if dist.get_rank() == 0 else None,
    )


def _restore(run: Run, resume: bool) -> bytes:
    """Take a new lineage and load the newest whole checkpoint, if resuming and there is one; the queue's snapshot."""
    root = run.folder / "checkpoints"
    chosen = torch.tensor([0, -1])
    if run.rank == 0:
        folder = None
        if resume:
            drop_torn_line(run.folder / "trained.jsonl")  # before any rank appends to it
            drop_unfinished(root)
            folder = newest_whole(root)
        chosen = torch.tensor([next_lineage(run.folder, resume), -1 if folder is None else read_state(folder).step])
    dist.broadcast(chosen, 0)
    run.lineage, step = chosen.tolist()
    if step < 0:
        return b""
    state, snapshot = load_checkpoint(folder_of(root, step), run.models.trained())
    run.start_step, run.kl.coef = state.step, state.kl_coef
    log.info("resuming after step %d as lineage %d", state.step, run.lineage)
    return snapshot


def _train_from_queue(run: Run, address: str, host: str, snapshot: bytes | None, wire: Wire) -> None:
    """Train on the batches of the queue at ``address``. A resumed run first rolls the queue back to ``snapshot``."""
    config = run.config
    keys = client_keys(config, run.folder)
    with SyncQueueClient(address, role="trainer", name=f"trainer-{run.rank}", keys=keys) as queue:
        run.source = sources.QueueSource(queue, config.trainer.batch_timeout_s)
        if run.rank != 0:
            run.publisher = _watched(run, _publisher(run, IdleCoordinator(), wire), None)
            train(run)
            return
        if snapshot is not None:
            resumed = queue.resume(run.start_step, run.lineage, snapshot)
            log.info("the queue kept %d groups and admits %d again", resumed.kept, resumed.readmitted)
        run.depth = QueueDepth(queue)
        if config.data.eval_path:
            record = functools.partial(record_evaluation, run.folder, run.lineage)
            run.evaluations = Evaluator(queue, config.eval.every, record)
        with WeightCoordinator(
            lambda: QueueClient(address, role="weights", name="coordinator", keys=keys),
            lambda record: connect(record.kind, record.url),
            _resolved_sync(run),
            config.rollout.start_timeout_s,
            host,
        ) as coordinator:
            run.publisher = _watched(run, _publisher(run, coordinator, wire), queue)
            if train(run):
                queue.finish()


def _resolved_sync(run: Run) -> WeightSyncConfig:
    """Return section ``weight_sync`` with the transport and the folder filled in."""
    sync = run.config.weight_sync
    folder = Path(sync.folder) / run.config.name / "weights" if sync.folder else run.folder / "weights"
    return msgspec.structs.replace(sync, transport=resolve_transport(run.config), folder=str(folder))


def _publisher(run: Run, publisher: WeightCoordinator | IdleCoordinator, wire: Wire) -> EnginePublisher:
    phase = build_phase(
        run.config.mode, publisher, barrier=dist.barrier, onload=run.models.wake, offload=run.models.sleep
    )
    gathering = Gathering(wire, run.rank, run.config.weight_sync.bucket_bytes, run.config.trainer.collective_timeout_s)
    return EnginePublisher(phase, gathering, run.config.trainer.lora if run.config.weight_sync.adapters else None)


def _watched(run: Run, publisher: Publisher, queue: SyncQueueClient | None) -> Publisher:
    """The publisher, comparing log-probabilities with the engines unless that is off. Rank 0 has the queue."""
    config = run.config
    mismatch, temperature = config.weight_sync.mismatch, config.rollout.temperature
    if mismatch.action == "off":
        return publisher
    canaries = None
    if queue is not None:
        canaries = Canaries(
            queue.engines,
            lambda record: connect(record.kind, record.url),
            vocabulary=AutoConfig.from_pretrained(config.model.path).vocab_size,
            tokens=min(mismatch.tokens, config.rollout.max_model_len - PROMPT_TOKENS),
            temperature=temperature,
            timeout_s=config.weight_sync.timeout_s,
        )
    return WatchedPublisher(publisher, canaries, mismatch, temperature)
