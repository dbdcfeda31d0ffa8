"""The trainer process: one per rank. Builds the parts from the run's config and hands them to ``train``.

``python -m rl_async.trainer --run RUN --queue ADDRESS [--resume]`` trains from the transfer queue;
``--replay FOLDER`` trains on the recorded trajectories of another run instead, without queue or engines.
"""

import argparse
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
from rl_async.configs.schema.run import RunConfig, WeightSyncConfig
from rl_async.files import drop_torn_line
from rl_async.process.heartbeat import beat
from rl_async.process.lifeline import watch_lifeline
from rl_async.process.log import setup_logging
from rl_async.process.stacks import answer_with_stacks
from rl_async.rollout_server.connect import connect
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.algorithms.kl import KlController
from rl_async.trainer.batches import sources
from rl_async.trainer.checkpoints.folder import drop_unfinished, folder_of, load_checkpoint, newest_whole, read_state
from rl_async.trainer.checkpoints.saver import Saver
from rl_async.trainer.models import build_models
from rl_async.trainer.monitoring.depth import QueueDepth
from rl_async.trainer.monitoring.evaluation import Evaluator
from rl_async.trainer.monitoring.guard import Guard
from rl_async.trainer.monitoring.ranks import end_well_or_say_why, start_process_group
from rl_async.trainer.monitoring.records import next_lineage
from rl_async.trainer.monitoring.stopping import StopRequest
from rl_async.trainer.monitoring.trackers import Tracking
from rl_async.trainer.publishing.canaries import PROMPT_TOKENS, Canaries
from rl_async.trainer.publishing.mismatch import WatchedPublisher
from rl_async.trainer.publishing.publisher import EnginePublisher, NoEngines, Publisher
from rl_async.trainer.step.update import Models
from rl_async.trainer.train import Run, record_evaluation, train
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client.async_client import QueueClient, SyncQueueClient
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.phases import IdleCoordinator, build_phase
from rl_async.weight_sync.reshard.gather import Gathering
from rl_async.weight_sync.reshard.wire import PointToPoint, Wire

log = logging.getLogger("rl_async.trainer")


def main() -> None:
    """Entry point; the exit code is 0 only when the last step was trained and published."""
    watch_lifeline()
    answer_with_stacks()
    stop = StopRequest()
    stop.listen()
    arguments = _parse()
    setup_logging(f"trainer-{os.environ.get('RANK', '0')}")
    end_well_or_say_why(arguments.run, lambda: _run(arguments, stop))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rl_async.trainer", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with config.yaml")
    parser.add_argument("--queue", help="address of the transfer queue")
    parser.add_argument(
        "--host", default="127.0.0.1", help="of this machine, where engines meet it (default: loopback)"
    )
    parser.add_argument("--replay", type=Path, help="train on this run folder's recorded trajectories")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, or from step 0")
    arguments = parser.parse_args()
    if (arguments.queue is None) == (arguments.replay is None):
        parser.error("give either --queue or --replay")
    return arguments


def _run(arguments: argparse.Namespace, stop: StopRequest) -> None:
    config = load_resolved(arguments.run / "config.yaml")
    beat(arguments.run, int(os.environ.get("RANK", "0")), 0, "starting")
    device, store = start_process_group(config)
    try:
        run = _base_run(config, arguments, build_models(config, device), stop)
        snapshot = _restore(run, arguments.resume)
        if arguments.queue is None:
            train(run)
        else:
            wire = PointToPoint(dist.PrefixStore("gathering", store), device=device)
            _train_from_queue(run, arguments, snapshot, wire)
    finally:
        dist.destroy_process_group()


def _base_run(config: RunConfig, arguments: argparse.Namespace, models: Models, stop: StopRequest) -> Run:
    trainer = config.trainer
    source = sources.RecordedSource((arguments.replay or arguments.run) / "trajectories")
    return Run(
        config=config,
        folder=arguments.run,
        lineage=0,
        start_step=0,
        models=models,
        algorithm=build(config),
        source=source,
        publisher=NoEngines(),
        guard=Guard.of(config),
        kl=KlController(config.algorithm.kl),
        saver=Saver(arguments.run / "checkpoints", trainer.keep_checkpoints, trainer.collective_timeout_s),
        stop=stop,
        tracking=Tracking(config, arguments.run) if dist.get_rank() == 0 else None,
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


def _train_from_queue(run: Run, arguments: argparse.Namespace, snapshot: bytes, wire: Wire) -> None:
    config, address = run.config, arguments.queue
    keys = client_keys(config, run.folder)
    with SyncQueueClient(address, role="trainer", name=f"trainer-{run.rank}", keys=keys) as queue:
        run.source = sources.QueueSource(queue, config.trainer.batch_timeout_s)
        if run.rank != 0:
            run.publisher = _watched(run, _publisher(run, IdleCoordinator(), wire), None)
            train(run)
            return
        if arguments.resume:
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
            arguments.host,
        ) as coordinator:
            run.publisher = _watched(run, _publisher(run, coordinator, wire), queue)
            if train(run):
                queue.finish()


def _resolved_sync(run: Run) -> WeightSyncConfig:
    """The section ``weight_sync`` with its transport and its folder, neither of them left to be derived."""
    sync = run.config.weight_sync
    folder = Path(sync.folder) / run.config.name / "weights" if sync.folder else run.folder / "weights"
    return msgspec.structs.replace(sync, transport=resolve_transport(run.config), folder=str(folder))


def _publisher(run: Run, publisher: WeightCoordinator | IdleCoordinator, wire: Wire) -> EnginePublisher:
    phase = build_phase(
        run.config.mode, publisher, barrier=dist.barrier, onload=run.models.wake, offload=run.models.sleep
    )
    bucket_bytes = int(run.config.weight_sync.bucket_mb * 2**20)
    gathering = Gathering(wire, run.rank, bucket_bytes, run.config.trainer.collective_timeout_s)
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


if __name__ == "__main__":
    main()
