"""The client in a Python that has nothing but the standard library and this project's files."""

import ast
import subprocess
import sys
from pathlib import Path

import rl_async

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from rl_async.gateway import Gateway, RemoteEpisode
standard = sys.stdlib_module_names | {"__main__"}
print(sorted(name for name in sys.modules if name.partition(".")[0] not in standard))
"""


def test_the_client_needs_the_standard_library_only() -> None:
    """-I -S: without the environment's variables, the working directory and site-packages."""
    place = str(Path(rl_async.__file__).parents[1])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", CODE, place], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {name.partition(".")[0] for name in ast.literal_eval(done.stdout)} == {"rl_async"}
