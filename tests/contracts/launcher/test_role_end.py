"""How a role's process ends while one of its daemon threads is in C++."""

import subprocess
import sys

ENDS = """
import sys, threading, time
from datetime import timedelta
from torch.distributed import HashStore
from rl_async.process.role import end_with

class EndsLate:
    def __del__(self):
        time.sleep(0.5)

def main():
    threading.Thread(target=HashStore().wait, args=(["never"], timedelta(seconds=0.3)), daemon=True).start()
    time.sleep(0.1)
    {end}

late = EndsLate()  # keeps the interpreter's end busy while the thread comes back from its wait
end_with(main)
"""


def test_a_thread_that_waits_in_torch_does_not_abort_the_end() -> None:
    for end, code in (("return 3", 3), ("sys.exit(4)", 4), ("sys.exit()", 0)):
        done = subprocess.run([sys.executable, "-c", ENDS.format(end=end)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (code, "")
