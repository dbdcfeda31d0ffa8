"""Other processes: their state and Python stacks, as ``rl-async doctor`` and waiting ranks read them, and their end."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from rl_async.insight.doctor import request_stacks
from rl_async.insight.roster import ProcessRecord
from rl_async.launcher.child_process import Child, Lifeline
from rl_async.process.kernel import catches, read_stat, state_of
from rl_async.process.private_folder import SEGMENTS
from rl_async.process.role import ASK, STACKS
from rl_async.process.run_files import beat, who_is_missing

SLEEPER = """
import sys, threading, time
from rl_async.process.role import answer_with_stacks
answer_with_stacks()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def deep():
    print("there", flush=True)
    time.sleep(60)
deep()
"""

LEAVES_MEMORY = """
import time
from multiprocessing.shared_memory import SharedMemory
from rl_async.process.private_folder import segment_name
segment = SharedMemory(segment_name(), create=True, size=8)
print(segment.name, flush=True)
time.sleep(60)
"""

ENDS = """
import os, sys, threading, time
from datetime import timedelta
from torch.distributed import HashStore
from rl_async.process.role import end_with

class EndsLate:
    def __del__(self):
        time.sleep(0.5)

def main(end):
    threading.Thread(target=HashStore().wait, args=(["never"], timedelta(seconds=0.3)), daemon=True).start()
    time.sleep(0.1)
    return end()

for end in (lambda: 3, lambda: sys.exit(4), lambda: sys.exit()):
    process = os.fork()
    if process == 0:
        late = EndsLate()  # keeps the interpreter's end busy while the thread comes back from its wait
        end_with(lambda: main(end))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_a_stopped_rank_is_called_stopped(tmp_path: Path) -> None:
    beat(tmp_path, 0, 3, "training")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        beat(tmp_path, 1, 3, "training")
        file = tmp_path / "ranks" / "1.json"
        file.write_text(file.read_text().replace(str(os.getpid()), str(other.pid)))
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        text = who_is_missing(tmp_path, 0, world=2)
        other.kill()
    assert text.startswith(f"rank 1 (pid {other.pid}) did not arrive: it is stopped (SIGSTOP), training of step 3")
    assert state_of(other.pid) == "gone" and "it is gone" in who_is_missing(tmp_path, 0, world=2)
    assert who_is_missing(tmp_path, 0, world=1) == ""


def test_a_process_that_sleeps_answers_with_its_stack(tmp_path: Path) -> None:
    file = tmp_path / "stacks" / "role.txt"
    file.parent.mkdir()
    command, env = [sys.executable, "-c", SLEEPER], os.environ | {STACKS: str(file)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as role:
        assert role.stdout is not None and role.stdout.readline() == "there\n"
        assert catches(role.pid, ASK) and not catches(role.pid, signal.SIGTERM)
        assert read_stat(role.pid).started > 0
        record = ProcessRecord(name="role", role="worker", pid=role.pid, started=0, state="running")
        found = request_stacks(tmp_path, [record])
        role.kill()
    assert [frame.name for frame in found["role"]] == ["deep", "<module>"], "the thread beside it is not the main one"


def test_a_thread_that_waits_in_torch_does_not_abort_the_end() -> None:
    """Processes that one of them forks, since each new one would import torch."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["3", "4", "0"])


async def test_shared_memory_of_a_killed_group_is_removed_also_after_the_supervisors_death(tmp_path: Path) -> None:
    async def start(lifeline: Lifeline) -> tuple[Child, Path]:
        command = [sys.executable, "-c", LEAVES_MEMORY]
        child = await Child.start("role", command, {}, tmp_path / "log", lifeline, tmp_path / "role.txt")
        async with asyncio.timeout(60):
            while "\n" not in child.output():  # noqa: ASYNC110 - a file sets no event
                await asyncio.sleep(0.02)
        return child, SEGMENTS / child.output().strip()

    with Lifeline() as lifeline:
        child, segment = await start(lifeline)
        assert segment.exists()
        await child.kill()
        assert not segment.exists()
        prefix = segment.name.rpartition("-")[0]
        left = SEGMENTS / f"{prefix}-left"
        left.touch()
        child, segment = await start(lifeline)
        assert segment.name.startswith(f"{prefix}-") and not left.exists()
        await child.kill()
