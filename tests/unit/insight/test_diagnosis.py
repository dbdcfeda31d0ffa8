"""Who is to blame, in many situations; each test changes one thing in a run that is fine."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rl_async.configs.load import dump, load_config
from rl_async.errors import UserError
from rl_async.insight.diagnosis import (
    Observation,
    ObservedEngine,
    ObservedProcess,
    ObservedQueue,
    ObservedRank,
    diagnose,
    needs_stacks,
)
from rl_async.insight.doctor import is_evaluated, is_evaluated_in_part, launcher_of, observe, oldest_groups, report
from rl_async.launcher.run_folder import hold
from rl_async.messages import GroupRecord, Inspection, LeaseRecord, StatusReport, Version
from rl_async.process.role import Frame
from rl_async.process.run_files import ProcessRecord
from rl_async.recording import evaluation_file, trained_file, write_trajectories

IN_ALL_REDUCE = (Frame("/x/torch/distributed/distributed_c10d.py", "1", "all_reduce"), Frame("/x/u.py", "2", "update"))
IN_MY_LOSS = (Frame("/home/me/loss.py", "7", "my_loss"), Frame("/x/u.py", "3", "update"))
NAMES = {"queue": 1, "trainer-0": 10, "trainer-1": 11, "engine-0": 20, "worker-0": 30}


def process(name: str, **changes: Any) -> ObservedProcess:
    """``kept`` is the state in which its supervisor has it."""
    exit, kept = changes.pop("exit", None), changes.pop("kept", "running")
    role = name.partition("-")[0]
    restarts = changes.pop("restarts", 0)
    at = ProcessRecord(
        name=name, role=role, pid=NAMES.get(name, 77), started=5, state=kept, exit=exit, restarts=restarts
    )
    return ObservedProcess(record=at, **({"state": "S"} | changes))


def rank(number: int, phase: str = "training", for_s: float = 1.0, step: int = 3) -> ObservedRank:
    return ObservedRank(rank=number, pid=10 + number, step=step, phase=phase, for_s=for_s)


def group(number: int, here: int, age_s: float) -> GroupRecord:
    """One that ``worker-0`` holds."""
    return GroupRecord(
        group_id=number,
        partition="train",
        state="leased",
        task_id="t",
        samples=4,
        here=here,
        workers=["agent-0-30-c0ffee"],
        age_s=age_s,
        nbytes=0,
    )


def inspection(lease: LeaseRecord | None = None, **changes: Any) -> Inspection:
    counts = {"waiting": 0, "leased": 1, "ready": 3, "reserved": 0, "committed": 0, "workers": 1, "unattended_s": 0.0}
    status = StatusReport(
        published=Version(0, 3),
        slots_used=4,
        slots=8,
        max_staleness=1,
        admitted=9,
        payload_bytes=0,
        counters={},
        oldest_lease_s=0.0,
        finished=False,
        **(counts | {key: changes.pop(key) for key in list(changes) if key in counts}),
    )
    if failure := changes.pop("failure", ""):
        counters = {"dead_letters": changes.pop("given_up", 44)}
        status = replace(status, counters=counters, last_failure=failure)
    whole = {"group_size": 4, "draining": False, "submitted": 0, "ages_s": {}, "rates": {}, "dead_letters": []}
    return Inspection(status=status, oldest_lease=lease, **(whole | changes))


def run(*processes: ObservedProcess, **changes: Any) -> Observation:
    """A run that is fine, with these processes in place of those of the same name."""
    known = {name: process(name) for name in NAMES} | {seen.record.name: seen for seen in processes}
    fine: dict[str, Any] = {
        "ranks": (rank(0), rank(1)),
        "queue": ObservedQueue(report=inspection()),
        "engines": (ObservedEngine(engine_id="engine-0", url="http://e", answers=True, paused=False, requests=4),),
        "steps": 40,
        "steps_done": 3,
        "usual_step_s": 2.0,
    }
    return Observation(run="r", processes=tuple(known.values()), **({"launcher": 99} | fine | changes))


def named(text: str, *parts: str) -> bool:
    """Whether a sentence names all of these: processes, keys, numbers, commands."""
    return all(part in text for part in parts)


def test_a_run_without_trouble_is_fine() -> None:
    verdict = diagnose(run())
    assert verdict.health == "fine" and named(verdict.text, "3 of 40 steps", "2.0 s")


def test_a_stopped_rank_is_named_with_who_waits_for_it_and_the_way_out() -> None:
    seen = run(
        process("trainer-0", stack=IN_ALL_REDUCE), process("trainer-1", state="T"), ranks=(rank(0, for_s=34), rank(1))
    )
    verdict = diagnose(seen)
    assert verdict.health == "stuck"
    assert named(verdict.text, "trainer rank 1 (pid 11)", "SIGSTOP", "rank 0", "all_reduce", "step 3 for 34 s")
    assert named(verdict.text, "kill -CONT 11", "kill -KILL 11")


def test_the_stopped_rank_comes_before_the_one_that_gave_up_waiting() -> None:
    gave_up = process("trainer-0", state="gone", exit=1, log_line="rank 0 lost the other ranks")
    findings = diagnose(run(gave_up, process("trainer-1", state="T"))).findings
    assert findings[0].startswith("trainer rank 1 (pid 11)") and named(findings[0], "SIGSTOP", "rank 0 waited")
    assert "rank 0 lost the other ranks" in findings[1]


@pytest.mark.parametrize(("code", "what"), [(1, "all ranks start again"), (3, "the run ends"), (2, "the run ends")])
def test_what_becomes_of_the_run_is_told_by_how_a_rank_ended(code: int, what: str) -> None:
    (found,) = diagnose(run(process("trainer-0", state="gone", exit=code))).findings
    assert what in found


def test_a_killed_rank_comes_before_the_one_that_lost_it() -> None:
    found = diagnose(
        run(process("trainer-0", state="gone", exit=1), process("trainer-1", state="gone", exit=-9))
    ).findings
    assert found[0].startswith("trainer rank 1 (pid 11) ended (killed by SIGKILL)")
    assert found[1].startswith("trainer rank 0 (pid 10) ended (exit code 1)")


def test_a_rank_that_hangs_outside_a_collective_is_told_from_those_inside() -> None:
    hung = process("trainer-1", stack=IN_MY_LOSS)
    seen = run(process("trainer-0", stack=IN_ALL_REDUCE), hung, ranks=(rank(0, for_s=50), rank(1, for_s=50)))
    verdict = diagnose(seen)
    assert verdict.health == "stuck" and len(verdict.findings) == 1
    assert verdict.text.startswith("trainer-1 (pid 11)") and named(verdict.text, "trainer-0", "collective", "50 s")
    assert named(verdict.text, "my_loss, me/loss.py:7", "trainer.collective_timeout_s")


def test_ranks_that_wait_for_a_publication_are_late_but_near_no_deadline_of_collectives() -> None:
    both = rank(0, "publishing", for_s=500), rank(1, "publishing", for_s=500)
    in_publish = (Frame("/x/weight_sync/coordinator.py", "9", "_with_ranks"),)
    waits = process("trainer-1", stack=IN_ALL_REDUCE)
    verdict = diagnose(run(process("trainer-0", stack=in_publish), waits, ranks=both))
    assert verdict.health == "slow" and named(verdict.text, "publishing", "weight_sync.sync_timeout_s")


def test_a_rank_that_is_in_a_collective_for_a_moment_waits_for_nobody_in_particular() -> None:
    assert (
        diagnose(run(process("trainer-0", stack=IN_ALL_REDUCE), process("trainer-1", stack=IN_MY_LOSS))).health
        == "fine"
    )


def test_what_an_earlier_process_of_a_rank_said_is_not_taken_for_its_own() -> None:
    other = ObservedRank(rank=1, pid=4711, step=3, phase="training", for_s=900)
    verdict = diagnose(run(process("trainer-0", state="T"), ranks=(other,)))
    assert "900" not in verdict.text and verdict.text.startswith("trainer-0 (pid 10) is stopped")


def test_a_stopped_worker_is_named_with_the_lease_that_it_holds() -> None:
    lease = LeaseRecord(group_id=12, worker="agent-0-30-c0ffee", age_s=9.0)
    verdict = diagnose(run(process("worker-0", state="T"), queue=ObservedQueue(report=inspection(lease))))
    assert named(verdict.text, "worker-0 (pid 30)", "SIGSTOP", "group 12", "9 s", "lease")


def test_a_dead_worker_that_is_being_started_again_is_no_reason_to_act() -> None:
    dead = process("worker-0", state="gone", exit=-9, kept="restarting")
    verdict = diagnose(run(dead, queue=ObservedQueue(report=inspection(), oldest=(group(8, here=1, age_s=3),))))
    assert verdict.health == "slow"
    assert named(verdict.text, "worker-0 (pid 30)", "killed by SIGKILL", "is started again", "group 8")


def test_a_role_that_failed_for_good_is_quoted() -> None:
    dead = process("worker-0", state="gone", exit=7, kept="failed", log_line="ValueError: broken")
    text = diagnose(run(dead)).text
    assert named(text, "worker-0 (pid 30)", "exit code 7", "not started again") and text.endswith("ValueError: broken")


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_frozen_engine_is_named(state: str) -> None:
    frozen = (ObservedEngine(engine_id="engine-0.1", url="http://e", answers=False),)
    text = diagnose(run(process("engine-0", state=state, waits_in="futex_wait"), engines=frozen)).text
    assert named(text, "engine-0 (pid 20)", "GET /health", "futex_wait")


def test_a_stopped_engine_is_called_stopped_and_not_frozen_too() -> None:
    frozen = (ObservedEngine(engine_id="engine-0", url="http://e", answers=False),)
    findings = diagnose(run(process("engine-0", state="T"), engines=frozen)).findings
    assert len(findings) == 1 and named(findings[0], "engine-0 (pid 20)", "SIGSTOP")


def test_an_engine_that_somebody_added_has_no_process_here() -> None:
    frozen = (ObservedEngine(engine_id="added-9000-1f3a", url="http://127.0.0.1:9000", answers=False),)
    text = diagnose(run(engines=frozen)).text
    assert text.startswith("added-9000-1f3a at http://127.0.0.1:9000") and "GET /health" in text


def test_a_queue_that_runs_and_does_not_answer_is_named() -> None:
    verdict = diagnose(run(process("queue", state="D", waits_in="fsync"), queue=None))
    assert verdict.text.startswith("queue (pid 1)") and named(verdict.text, "waits for a disk or a device", "fsync")


def test_a_queue_that_was_just_started_is_given_time_to_answer() -> None:
    verdict = diagnose(run(process("queue", age_s=2.0), queue=None))
    assert verdict.health == "slow" and named(verdict.text, "queue (pid 1)", "2 s")
    assert diagnose(run(process("queue", age_s=60.0), queue=None)).health == "stuck"
    stopped = diagnose(run(process("queue", age_s=2.0, state="T"), queue=None))
    assert stopped.health == "stuck" and named(stopped.text, "queue (pid 1)", "SIGSTOP")
    assert diagnose(run(process("queue", age_s=2.0))).health == "fine"


def test_a_queue_that_is_gone_is_named_once() -> None:
    findings = diagnose(run(process("queue", state="gone", exit=-9), queue=None)).findings
    assert len(findings) == 1 and named(findings[0], "queue (pid 1)", "killed by SIGKILL", "trainer, workers")


def test_a_full_disk_comes_before_what_it_broke() -> None:
    findings = diagnose(run(process("trainer-0", state="gone", exit=1), disk_free=1 << 20)).findings
    assert named(findings[0], "the run's folder", "1 MiB free") and len(findings) == 2


def test_a_stopped_launcher_restarts_nothing() -> None:
    text = diagnose(run(launcher_state="T")).text
    assert text.startswith("the launcher (pid 99)") and "SIGSTOP" in text


def waiting(for_s: float, queue: Inspection, **changes: Any) -> Observation:
    at = (rank(0, "waiting for a batch", for_s), rank(1, "waiting for a batch", for_s))
    return run(ranks=at, queue=ObservedQueue(report=queue), **changes)


def test_a_long_wait_for_a_batch_that_is_being_generated_is_slow_and_says_what_is_missing() -> None:
    lease = LeaseRecord(group_id=12, worker="agent-0-30-c0ffee", age_s=41.0)
    verdict = diagnose(waiting(60.0, inspection(lease)))
    assert verdict.health == "slow"
    assert named(verdict.text, "3 groups are ready", "1 are being generated", "300 s (trainer.batch_timeout_s)")
    assert any(named(line, "group 12", "agent-0-30-c0ffee", "41 s") for line in verdict.waits)


def test_stacks_are_wanted_of_what_is_silent_or_late_alone() -> None:
    silent = ObservedEngine(engine_id="engine-0", url="http://e", answers=False)
    for wanting in (run(queue=None), run(engines=(silent,)), run(ranks=(rank(0, for_s=90.0), rank(1)))):
        assert needs_stacks(wanting)
    restarted = run(process("engine-0", state="gone", kept="restarting", exit=-9), engines=(silent,))
    for fine in (run(), restarted, run(queue=None, launcher=None)):
        assert not needs_stacks(fine)


@pytest.mark.parametrize("role", ["engine", "worker"])
def test_a_process_without_which_the_run_goes_on_is_no_failure_unless_it_was_the_last(role: str) -> None:
    given_up = {"state": "gone", "kept": "failed", "exit": 7, "restarts": 3, "log_line": "something broke"}
    verdict = diagnose(run(process(f"{role}-1", **given_up)))
    assert verdict.health == "fine" and named(verdict.findings[1], f"{role}-1", "exit code 7", "something broke")
    assert diagnose(run(process(f"{role}-0", **given_up))).health == "stuck"


def test_a_run_that_has_become_slow_names_its_slow_engine() -> None:
    def engine(number: int, answer_s: float = 0.01, version: str = "0.3") -> ObservedEngine:
        return ObservedEngine(
            engine_id=f"engine-{number}", url="u", answers=True, answer_s=answer_s, version=version, tokens_per_s=5.0
        )

    slowdown = "steps take 4.5 s, where earlier ones took 0.5 s"
    verdict = diagnose(run(slowdown=slowdown, engines=(engine(0), engine(1, answer_s=0.4))))
    assert verdict.health == "slow" and slowdown in verdict.text
    assert len(verdict.findings) == 2 and named(verdict.findings[1], "engine-1", "0.40 s", "5 tokens/s")
    verdict = diagnose(run(engines=(engine(0), engine(1, version="0.1"))))
    assert verdict.health == "fine" and named(verdict.findings[1], "engine-1", "0.1", "0.3")
    for fine in ((engine(0), engine(1)), (engine(0), engine(1, answer_s=0.1)), (engine(1, answer_s=0.4),)):
        assert len(diagnose(run(engines=fine)).findings) == 1


@pytest.mark.parametrize(
    ("part", "words"), [("reward", ("5.5 s", "4.0 s", "judge")), ("tools", ("tool calls",)), ("generate", ("engines",))]
)
def test_a_run_whose_batches_come_late_names_the_slow_part_of_an_episode(part: str, words: tuple[str, ...]) -> None:
    usual = {"generate": 0.5, "tools": 0.5, "environment": 0.5, "reward": 0.5}
    verdict = diagnose(
        run(slowdown="steps take long", episode_s=usual | {part: 4.0}, rewards=("exact_answer", "judge"))
    )
    assert verdict.health == "slow" and len(verdict.findings) == 2 and named(verdict.findings[1], *words)


def test_a_wait_is_not_slow_where_steps_take_as_long() -> None:
    assert diagnose(waiting(60.0, inspection(), usual_step_s=45.0)).health == "fine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queue": inspection(draining=True)}, "the queue is drained"),
        ({"queue": inspection(workers=0)}, "no agent worker is connected"),
        ({"queue": inspection(unattended_s=280.0)}, "no program has asked for an episode for 280 s"),
        ({"queue": inspection(), "engines": ()}, "no engine is registered"),
        (
            {"queue": inspection(), "engines": (ObservedEngine(engine_id="e", url="u", answers=True, paused=True),)},
            "every engine is paused",
        ),
    ],
)
def test_a_wait_for_a_batch_that_nobody_makes_is_stuck(changes: dict[str, Any], words: str) -> None:
    verdict = diagnose(waiting(60.0, **changes))
    assert verdict.health == "stuck" and words in verdict.text


@pytest.mark.parametrize("for_s", [5.0, 60.0])
def test_groups_given_up_before_any_was_completed_are_a_failure_and_later_ones_are_told(for_s: float) -> None:
    failing = inspection(failure="RuntimeError: loop broke", ready=0, leased=0)
    verdict = diagnose(waiting(for_s, failing, steps_done=0))
    assert verdict.health == "stuck" and named(verdict.text, "44 groups", "loop broke", "r/logs/worker-")
    later = diagnose(waiting(for_s, failing))
    assert later.health == ("slow" if for_s > 30 else "fine") and named(later.findings[1], "44 groups", "loop broke")
    one_done = inspection(failure="RuntimeError: loop broke", ready=1)
    few = inspection(failure="RuntimeError: loop broke", given_up=7, ready=0, leased=4)  # of eight slots
    for others in (one_done, few):
        verdict = diagnose(waiting(for_s, others, steps_done=0))
        assert verdict.health == later.health and named(verdict.findings[1], "loop broke")


def test_a_run_that_ended_well_and_one_that_did_not() -> None:
    assert diagnose(run(launcher=None, steps_done=40)).health == "over"
    failed = process("worker-0", state="gone", exit=7, kept="failed", log_line="ValueError: broken")
    verdict = diagnose(run(failed, launcher=None))
    assert verdict.health == "failed"
    assert named(verdict.text, "worker-0 (pid 30)", "ValueError: broken", "3 of 40 steps")
    assert diagnose(run(launcher=None)).health == "failed"
    assert diagnose(run(launcher=None, evaluated=True)).health == "over"
    in_part = diagnose(run(launcher=None, evaluated_in_part=True))
    assert in_part.health == "failed" and "steps" not in in_part.text


def test_the_report_ends_with_the_verdict() -> None:
    held = ObservedQueue(report=inspection(), oldest=(group(12, here=2, age_s=9),))
    seen = run(process("trainer-1", state="T"), process("trainer-0", stack=IN_ALL_REDUCE), queue=held)
    verdict = diagnose(seen)
    lines = report(seen, verdict).splitlines()
    assert lines[-1] == f"verdict: {verdict.text}"
    assert any(line.split() == ["leased", "12", "9.0", "s", "2/4", "agent-0-30-c0ffee"] for line in lines)
    assert "    all_reduce (torch/distributed/distributed_c10d.py:1)" in lines
    assert "engine-0: answers, version none yet, 4 requests (http://e)" in lines


def test_escape_sequences_of_a_log_do_not_reach_the_terminal() -> None:
    seen = run(process("worker-0", state="gone", exit=1, log_line="\x1b]0;owned\x07 boom"))
    text = report(seen, diagnose(seen))
    assert "boom" in text and not {"\x1b", "\x07"} & set(text)


@pytest.mark.parametrize(
    "engine",
    [
        {"kept": "starting", "restarts": 2, "age_s": 3.0},
        {"kept": "restarting", "restarts": 1, "state": "gone", "exit": 1},
        {"kept": "running", "restarts": 3, "age_s": 5.0},
        {"kept": "starting", "restarts": 1, "state": "gone"},  # and the launcher has not noticed yet
    ],
)
def test_an_only_engine_that_ends_again_and_again_is_named_with_its_last_words(engine: dict[str, Any]) -> None:
    verdict = diagnose(run(process("engine-0", log_line="MemoryError: cache", **engine), engines=(), max_restarts=4))
    assert verdict.health == "stuck"
    assert named(verdict.text, "engine-0 (pid 20)", "MemoryError: cache", "engine-0.log", "launcher.max_restarts")
    assert named(verdict.text, "nothing is generated", "4 restarts")


@pytest.mark.parametrize("flush_s", [5.0, 0.2])
def test_a_queue_whose_disk_is_slow_to_flush_is_slow(flush_s: float) -> None:
    report = inspection()
    queue = ObservedQueue(report=replace(report, status=replace(report.status, flush_s=flush_s)))
    verdict = diagnose(run(queue=queue))
    assert verdict.health == ("slow" if flush_s > 1 else "fine") and len(verdict.findings) == 1
    assert ("queue.sqlite.folder" in verdict.text) == (flush_s > 1)
    slowdown = "steps take 4.5 s, where earlier ones took 0.5 s"
    both = diagnose(run(queue=queue, slowdown=slowdown))
    assert slowdown in both.text and [named(text, "5.0 s") for text in both.findings[1:]] == [True] * (flush_s > 1)


def test_a_first_restart_is_slow_until_it_serves_and_old_restarts_are_fine() -> None:
    starting = diagnose(run(process("engine-0", kept="starting", restarts=1, age_s=3.0)))
    assert starting.health == "slow" and "engine-0 (pid 20)" in starting.text
    assert diagnose(run(process("engine-0", restarts=3, age_s=600.0))).health == "fine"
    assert diagnose(run(process("engine-0", kept="starting", age_s=300.0))).health == "fine", "a large model loads"


def test_processes_of_a_run_that_ends_are_not_lost() -> None:
    ended = [process(name, state="gone", kept="ended", exit=0) for name in ("queue", "trainer-0", "trainer-1")]
    changes: dict[str, Any] = {"steps": 60, "steps_done": 60, "queue": None, "engines": (silent_engine(),)}
    seen = run(*ended, **changes)
    assert diagnose(seen).health == "fine" and len(diagnose(seen).findings) == 1 and not needs_stacks(seen)
    stopped = diagnose(replace(seen, launcher_state="T"))
    assert stopped.health == "stuck" and "kill -CONT" in stopped.text
    lost = diagnose(replace(seen, steps_done=59))
    assert lost.health == "stuck"


def silent_engine() -> ObservedEngine:
    return ObservedEngine(engine_id="engine-0", url="http://x", answers=False)


def test_a_queue_that_stood_still_is_told_beside_the_rest() -> None:
    report = inspection()
    status = replace(report.status, counters={"held_up": 3})
    found = diagnose(run(queue=ObservedQueue(report=replace(report, status=status))))
    assert found.health == "fine" and len(found.findings) == 2 and named(found.findings[1], "3 times", "queue.log")


def test_the_launcher_is_who_holds_the_lock(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert launcher_of(run) is None
    with hold(run):
        assert launcher_of(run) == os.getpid()
    run.with_name(".run.lock").write_text("999999999\n")
    assert launcher_of(run) is None


def test_the_oldest_group_of_each_state_is_listed() -> None:
    def group(number: int, state: str, age: float, partition: str = "train") -> GroupRecord:
        return GroupRecord(
            group_id=number,
            partition=partition,
            state=state,
            task_id="t",
            samples=4,
            here=0,
            workers=[],
            age_s=age,
            nbytes=0,
        )

    groups = [
        group(1, "ready", 0.0),
        group(2, "leased", 3.0),
        group(3, "leased", 9.0),
        group(4, "leased", 99.0, "eval"),
    ]
    assert [g.group_id for g in oldest_groups(groups)] == [1, 3]


def test_a_fine_tuning_is_not_diagnosed_as_a_run(tmp_path: Path) -> None:
    (tmp_path / "processes.json").write_text("[]")
    config = load_config(None, ["model.path=base", "data.path=chats.jsonl", "finetune.out=out"])
    (tmp_path / "config.yaml").write_text(dump(config))
    with pytest.raises(UserError, match="fine-tuning"):
        observe(tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_an_evaluation_is_over_once_all_of_it_is_recorded(tmp_path: Path, whole: bool) -> None:
    roles = ["queue", "engine", "worker"]

    def seen(roles: list[str]) -> tuple[bool, bool]:
        return is_evaluated(tmp_path, roles), is_evaluated_in_part(tmp_path, roles)

    assert seen(roles) == (False, False)
    write_trajectories(evaluation_file(tmp_path, 0, whole=whole), [])
    assert seen(roles) == (whole, not whole)
    assert seen([*roles, "trainer"]) == seen([]) == (False, False)


@pytest.mark.parametrize("slow", ["wait_batch", "sync"])
def test_where_batches_come_late_an_episode_of_a_recorded_step_is_timed(tmp_path: Path, slow: str) -> None:
    (tmp_path / "processes.json").write_text("[]")
    (tmp_path / "config.yaml").write_text(dump(load_config("calculator", [])))
    steps = []
    for step in range(30):
        seconds = dict.fromkeys(("wait_batch", "train", "sync"), 0.1)
        if step >= 20:
            seconds[slow] = 6.0
        times = {f"time/{phase}_s": of_phase for phase, of_phase in seconds.items()}
        steps.append({"step": step, "time/step_s": sum(seconds.values()), "tokens/per_s": 1 / seconds[slow], **times})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    file = trained_file(tmp_path, 28, 0, 0)
    file.parent.mkdir()
    timings = ({"generate": 1.0, "reward": 3.0}, {"generate": 2.0, "tools": 1.0, "reward": 5.0})
    file.write_bytes(gzip.compress("".join(json.dumps({"timings": each}) + "\n" for each in timings).encode()))
    seen = observe(tmp_path)
    assert "6." in seen.slowdown and not seen.trouble
    timed = {"generate": 1.5, "tools": 0.5, "environment": 0.0, "reward": 4.0}
    assert seen.episode_s == (timed if slow == "wait_batch" else {})
    file.write_bytes(file.read_bytes()[:-9])
    assert any(file.name in line for line in observe(tmp_path).trouble) == (slow == "wait_batch")
