"""The parts of benchmarks that compute rather than measure."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement

from benchmarks import __main__ as every
from benchmarks import transfer_queue, whole_steps
from benchmarks.algorithms import batch, loss_work
from benchmarks.planned.published import (
    HALVINGS,
    Decoded,
    Measured,
    Run,
    Table,
    bisect,
    colocated,
    engine_latency,
    generation_s,
    imbalance,
    median_length,
    predict,
    tables,
)
from benchmarks.processes.telemetry_peers import scraped
from benchmarks.processes.whole_run import Arm, TrlRun
from benchmarks.real.steps import MODES, SHAPES, lengthened, overrides_of, sums
from benchmarks.real.time_to_reward import Step, first_above
from benchmarks.runbook import HINTS, ITEMS, QUARTER, installed, last_lines, medians, missing
from benchmarks.tails.clock import SimulatedLoop
from benchmarks.tails.engines import ITERATION_S, Engine, iteration_s
from benchmarks.tails.run import Arm as TailArm
from benchmarks.tails.run import simulate
from rl_async.configs.load import load_config
from rl_async.errors import RlAsyncError
from rl_async.launcher.capacity import EpisodeShape
from rl_async.launcher.plan.planning import plan
from rl_async.messages import Sampling, Version, VersionRun
from rl_async.process.http_auth import make_tokens
from rl_async.process.run_files import Target, write_targets
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.trainer.algorithms.losses import LOSSES


class Words:
    """Renders a conversation as its words."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[str]:
        assert options["add_generation_prompt"]
        return [word for message in messages for word in message["content"].split()]


def steps(*rewards: float) -> tuple[list[Step], dict[Path, float]]:
    """Steps of ten seconds each, and what their weights reach."""
    made = [Step(10.0 * number, 0.5, Path(str(number))) for number in range(1, len(rewards) + 1)]
    return made, {step.weights: reward for step, reward in zip(made, rewards, strict=True)}


def test_the_time_to_a_reward_is_that_of_the_first_weights_that_reach_it() -> None:
    made, held_out = steps(0.2, 0.84, 0.85, 0.5, 0.9, 1.0)
    asked: list[Path] = []

    def evaluate(weights: Path) -> float:
        asked.append(weights)
        return held_out[weights]

    assert first_above(0.85, "ours", made, evaluate) == 30.0
    assert asked == [step.weights for step in made[:5]]  # and two more, to see whether it stays there


def test_weights_that_never_reach_the_reward_take_no_time() -> None:
    made, held_out = steps(0.2, 0.4)
    assert first_above(0.85, "TRL", made, held_out.__getitem__) is None


def test_the_median_is_over_the_steps_of_all_runs() -> None:
    arm = Arm()
    arm.add([1.0, 9.0], {"training": 1.0})
    arm.add([2.0], {"training": 3.0})
    assert arm.median == 2.0
    assert arm.parts["training"] == [1.0, 3.0]


def test_what_the_roles_of_a_run_compute_is_added_up_for_each_run() -> None:
    arm = Arm()
    arm.add([1.0], {"training": 7.0, "processor of queue": 0.25, "processor of trainer": 0.5})
    arm.add([1.0], {"training": 7.0, "processor of queue": 0.5, "processor of trainer": 1.0})
    assert arm.processor() == [0.75, 1.5]


def test_telemetry_is_compared_by_pairs_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"off-0": 1.0, "on-0": 1.1, "off-1": 2.0, "on-1": 2.4, "off-2": 4.0, "on-2": 4.0}
    collector = SimpleNamespace(endpoint="", bodies=[1])
    monkeypatch.setattr(whole_steps, "make_inputs", lambda folder: None)
    monkeypatch.setattr(whole_steps, "discarding_collector", lambda: nullcontext(collector))
    monkeypatch.setattr(whole_steps, "scraped", lambda run: nullcontext({}))

    def ours(folder: Path, mode: str, name: str, more: list[str]) -> tuple[list[float], dict[str, float]]:
        collector.bodies.append(1)
        return [2.0 if more else 1.0], {"processor of engine": used[name]}

    monkeypatch.setattr(whole_steps, "ours", ours)
    found = whole_steps.telemetry_overhead(3)
    assert found.wall == 1.0 and found.cpu == pytest.approx(0.1)


def test_steps_of_trl_are_from_the_end_of_one_to_the_end_of_the_next() -> None:
    run = TrlRun(ends=[5.0, 8.0, 12.0], processor=[1.0, 3.0, 6.0], tokens=[12.0] * 3, rewards=[], generating=[2, 1, 3])
    seconds, parts = run.steps(range(1, 3), tokens=12)
    assert seconds == [3.0, 4.0]
    assert parts == {"generation": 2.0, "processor": 2.5}


def test_a_run_of_trl_with_short_answers_is_not_compared() -> None:
    run = TrlRun(ends=[1.0, 2.0], processor=[0.0, 0.0], tokens=[12.0, 9.0], rewards=[], generating=[1.0, 1.0])
    with pytest.raises(SystemExit):
        run.steps(range(1, 2), tokens=12)


def test_a_prompt_is_lengthened_by_examples_before_its_question() -> None:
    asked = lengthened([{"role": "user", "content": "What is 3 + 4?"}], 60, Words())  # type: ignore[arg-type]
    words = asked[-1]["content"].split()
    assert 60 <= len(words) < 66
    assert asked[-1]["content"].endswith("What is 3 + 4?")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_runs_of_a_shape_have_room_for_its_rows(shape: str, mode: str, tmp_path: Path) -> None:
    config = load_config("smollm2", overrides_of(tmp_path, SHAPES[shape], mode, 3))
    assert config.data.train_batch_groups * config.rollout.group_size == SHAPES[shape].groups * SHAPES[shape].group_size
    assert config.rollout.max_model_len >= SHAPES[shape].prompt + config.rollout.max_tokens
    assert config.queue.max_staleness == (mode == "disaggregated")


def test_both_arms_get_the_tasks_of_the_preset(tmp_path: Path) -> None:
    held_out = sums(tmp_path, "test")
    assert len(held_out) == load_config("smollm2").eval.tasks
    asked = {row["prompt"][-1]["content"] for row in held_out}
    assert not asked & {row["prompt"][-1]["content"] for row in sums(tmp_path)}


def test_every_benchmark_of_one_command_is_a_module_that_writes_a_file() -> None:
    folder = Path(every.__file__).parent
    modules = {path.stem: path.read_text() for path in folder.glob("*.py")}
    modules |= {path.parent.name: path.read_text() for path in folder.glob("*/__main__.py")}
    for name, benchmark in every.BENCHMARKS.items():
        assert "--json" in modules[name] or "parser(" in modules[name], name
        assert all(option in modules[name] for option, _ in benchmark.peers), name


def test_a_peer_that_is_there_is_passed_on_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.touch(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(every.PEERS, "vLLM", every.Peer("bin/python", "install it"))
    monkeypatch.setitem(every.PEERS, "TRL", every.Peer("/nowhere/python", "make it"))
    benchmark = every.BENCHMARKS["real_model"]
    assert every.missing(benchmark) == {"TRL": "make it"}
    assert every.command("real_model", benchmark, Path("f"))[1:] == [
        *("-m", "benchmarks.real_model", *benchmark.arguments, "--vllm", str(program), "--json", "f")
    ]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_is_measured(name: str) -> None:
    values = batch(2, 8)
    work, reads = loss_work(LOSSES[name], values)
    work()
    assert all(read.shape == (2, 8) for read in reads)


@contextmanager
def scraped_server(run: Path, status: int) -> Iterator[threading.Event]:
    """List a process that answers every scrape with ``status``; yields what is set once it was asked."""
    asked = threading.Event()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            asked.set()

    make_tokens(run / "keys")
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        write_targets(run, "queue", [Target(f"127.0.0.1:{server.server_port}", "queue", "queue")])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()


def test_scrapes_that_are_answered_are_counted(tmp_path: Path) -> None:
    with scraped_server(tmp_path, 200) as asked, scraped(tmp_path, every_s=0.01) as answers:
        assert asked.wait(30)
    assert answers["queue"] >= 1


def test_a_benchmark_of_telemetry_ends_if_its_scrapes_are_refused(tmp_path: Path) -> None:
    with scraped_server(tmp_path, 401) as asked, pytest.raises(SystemExit), scraped(tmp_path, every_s=0.01):
        assert asked.wait(30)


def test_a_benchmark_of_telemetry_ends_if_no_process_is_listed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), scraped(tmp_path, every_s=0.01):
        pass


def test_the_runbook_for_gpus_explains_every_item() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "gpu.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    for name in (*ITEMS, *QUARTER):
        tables = 2 if name in ITEMS and name in QUARTER else 1
        assert sum(line.startswith(f"| `{name}` |") for line in lines) == tables, f"{name}: what it measures"
    assert HINTS.keys() == ITEMS.keys() | QUARTER.keys()
    assert sum(item.minutes for item in QUARTER.values() if not item.needs) <= 16


def test_the_runbook_names_what_this_python_lacks() -> None:
    assert missing() == []
    assert installed(Requirement("numpy>=1")) and installed(Requirement("absent; platform_system == 'Plan9'"))
    assert not installed(Requirement("numpy<1")) and not installed(Requirement("absent-package"))


def test_an_item_that_failed_shows_how_its_roles_ended(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine-0.log").write_text("".join(f"line {number}\n" for number in range(40)))
    assert last_lines(tmp_path, 2) == "-- engine-0.log\nline 38\nline 39"


def test_a_runs_figures_are_medians_without_its_first_two_steps() -> None:
    steps = [{"time/step_s": seconds, "mismatch/mean": None} for seconds in (100.0, 100.0, 3.0, 1.0, 2.0)]
    assert medians(steps) == {"steps": 5, "time/step_s": 2.0}
    assert medians(steps[:2]) == {"steps": 2}


def test_runs_of_the_runbook_fit_on_eight_gpus(tmp_path: Path) -> None:
    runs = [item.command for item in ITEMS.values() if "launch" in item.command]
    assert len(runs) == 9
    for command in runs:
        given = command[command.index("launch") + 1 :]
        config = load_config(given[given.index("--config") + 1], [word for word in given if "=" in word])
        config = msgspec.structs.replace(config, mode=given[given.index("--mode") + 1])
        planned = plan(config, tmp_path, gpus=8)
        used = [device for process in planned.processes for device in process.device.removeprefix("gpu:").split(",")]
        assert {*used} - {"cpu"} <= {str(gpu) for gpu in range(8)}, command


def test_published_tables_are_whole_and_predict_no_run_that_calibrates() -> None:
    assert sum(table.decoded is not None for table in tables()) == 1
    for table in tables():
        assert table.source.startswith("https://") and (table.predicted or table.decoded)
        calibrating = [] if table.apart is None else [(table.apart.name, table.apart.ranks)]
        if (run := table.measured) is not None:
            phases = run.generate_s + run.update_s + run.logprob_s
            assert phases <= 1.01 * (run.phases_of_s or run.step_s), "the phases of a colocated step follow one another"
            calibrating.append(("colocated", run.ranks))
        else:
            assert all(0 < (each.sampled or 0) < table.max_tokens for each in table.predicted)
        assert not {(each.name, each.ranks) for each in table.predicted} & {*calibrating}
        assert all(each.step_s > 0 and each.ranks % table.training_parallel == 0 for each in table.predicted)


def published(model: str, **changes: Any) -> Table:
    """A table with a small batch."""
    table = next(table for table in tables() if table.model.startswith(model))
    return msgspec.structs.replace(table, groups=8, **changes)


def test_a_run_whose_answers_have_known_lengths_is_predicted_from_the_data_sheet() -> None:
    table = published("Llama")
    run = table.predicted[0]
    runs = [msgspec.structs.replace(run, sampled=sampled) for sampled in (200, 1000)]
    short, long = predict(msgspec.structs.replace(table, predicted=runs), 1e-4)
    assert long.step_s > 2 * short.step_s
    costly = msgspec.structs.replace(table, predicted=runs[:1], forwards=200)
    assert predict(costly, 1e-4)[0].step_s > 1.2 * short.step_s
    assert predict(msgspec.structs.replace(table, predicted=runs[:1]), 5e-4)[0].step_s > 1.2 * short.step_s


def test_calibration_finds_the_latency_and_the_length_that_made_the_times() -> None:
    table = msgspec.structs.replace(published("Qwen2.5", max_tokens=4000), groups=12)
    latency, median = 2e-4, 600.0
    measured = Measured(ranks=16, step_s=1e4, generate_s=0.0, update_s=1.0, logprob_s=0.0)
    generate_s = generation_s(table, colocated(table, measured.ranks), median, latency)
    fewer = msgspec.structs.replace(table, tensor_parallel=1, group_size=12)
    alone = Run(name="colocated", engines=1, ranks=1, bound=0, step_s=0.0)
    seconds = generation_s(fewer, alone, median, latency)
    decoded = Decoded(engines=1, tensor_parallel=1, group_size=12, generate_s=seconds)
    measured = msgspec.structs.replace(measured, generate_s=generate_s)
    table = msgspec.structs.replace(table, measured=measured, decoded=decoded)
    found = engine_latency(table)
    assert found == pytest.approx(latency, rel=0.15)
    assert median_length(table, measured, found) == pytest.approx(median, rel=0.15)


def test_a_disaggregated_run_gives_the_cost_with_which_its_own_step_is_as_long() -> None:
    table = published("Qwen2.5")
    assert table.measured is not None and table.apart is not None
    generate_s = generation_s(table, colocated(table, table.measured.ranks), 2000.0, 1e-4)
    measured = msgspec.structs.replace(table.measured, generate_s=generate_s, phases_of_s=None)
    table = msgspec.structs.replace(table, measured=measured, predicted=[table.apart])
    assert predict(table, 1e-4)[0].error == pytest.approx(0.0, abs=0.02)


def test_a_mini_batch_ends_with_the_rank_that_has_most_tokens() -> None:
    table = published("Llama")
    same, mixed = ([EpisodeShape(n, n, 1, 0.0) for n in tokens] for tokens in ((100, 100), (10, 190)))
    assert imbalance(table, same, 16) == 1.0 and imbalance(table, mixed, 2) == 1.0
    few, many = (imbalance(table, mixed, ranks) for ranks in (16, 128))
    assert 1.0 < few < many
    together = msgspec.structs.replace(table, training_parallel=16)
    assert imbalance(together, mixed, 128) == few


def test_phases_of_other_steps_are_taken_to_have_the_same_shares() -> None:
    run = Measured(ranks=1, step_s=50.0, generate_s=40.0, update_s=30.0, logprob_s=10.0, phases_of_s=100.0).scaled()
    assert (run.generate_s, run.update_s, run.logprob_s, run.step_s) == (20.0, 15.0, 5.0, 50.0)


def test_a_length_is_found_with_which_the_generation_takes_as_long() -> None:
    assert bisect(lambda x: x * x, 0.0, 16.0, 25.0) == pytest.approx(5.0, abs=16 / 2**HALVINGS)


@pytest.mark.parametrize("groups", [transfer_queue.FEWEST, 800, 1279, 4800])
def test_few_groups_of_the_queue_are_enough_for_a_rate(groups: int) -> None:
    for measured in (groups, transfer_queue.long_groups(groups)):
        assert measured // transfer_queue.BATCH > 1


@pytest.mark.parametrize("flags", [("--throughput-groups", "63"), ("--repeats", "0"), ("--groups", "0")])
def test_arguments_too_small_to_measure_are_refused(
    flags: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["transfer_queue", *flags])

    with pytest.raises(SystemExit) as ended:
        transfer_queue.main()

    assert ended.value.code == 2 and flags[0] in capsys.readouterr().err


# The simulated runs of ``benchmarks.tails``: their clock, their engines, and what must hold of every row.


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=[1], sampling=Sampling(), max_tokens=100, stop_token_ids=[])


async def answer(engine: Engine, name: str) -> GenerateResult:
    (part,) = [part async for part in engine.stream(request(name), session=name)]
    return part


def test_simulated_time_takes_none() -> None:
    async def sleeps() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(sleeps()) == pytest.approx(3600)
    assert time.monotonic() - began < 60


def test_a_simulated_run_that_has_stopped_says_so() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    loop = SimulatedLoop()
    task = loop.create_task(waits())
    with pytest.raises(RlAsyncError):
        loop.run_until_complete(task)
    loop._jumping.now = 0.0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_two_sequences_share_an_engine_and_go_on_with_the_next_weights() -> None:
    async def play() -> tuple[float, GenerateResult]:
        loop = asyncio.get_running_loop()
        engine = Engine({"short": 10, "long": 30}.__getitem__)
        answers = [asyncio.create_task(answer(engine, name)) for name in ("short", "long")]
        await answers[0]
        engine.pause()
        await asyncio.sleep(5.0)
        engine.resume(Version(0, 1))
        long = await answers[1]
        assert engine.sampled == pytest.approx(40)
        return loop.time(), long

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        took, long = runner.run(play())
    assert took == pytest.approx(10 * iteration_s(2) + 5.0 + 20 * iteration_s(1))
    assert iteration_s(2) > iteration_s(1) > ITERATION_S
    assert long.versions == [VersionRun(Version(0, 0), 0, 10), VersionRun(Version(0, 1), 10, 30)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["wait", "drop", "mask"])
def test_a_simulated_run_keeps_its_bound_and_is_no_faster_than_the_ideal_one(policy: str) -> None:
    arm = TailArm(max_staleness=1, on_straggler=policy)
    outcome, ideal_s = simulate(arm, steps=4, train=1.0)
    assert outcome.oldest <= 1
    if policy == "wait":
        assert outcome.seconds_per_step >= ideal_s * 0.999
    assert (outcome.masked > 0) == (policy == "mask")
    assert (outcome.wasted > 0.02) == (policy == "drop")
