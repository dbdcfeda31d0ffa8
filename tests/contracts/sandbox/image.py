"""Makes a container image of this machine's own files, where no registry can be reached: what the tests of containers
need, as ``python -m tests.contracts.sandbox.image IMAGE COMMAND...``, where COMMAND is docker or podman with options.
"""

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

PYTHON = "/usr/bin/python3"  # the system's, whose prefix is /usr
PROGRAMS = (
    *("bash", "sh", "env", "cat", "ls", "head", "wc", "sort", "grep", "find", "sleep", "yes", "truncate", "id", "true"),
    *("rm", "cp", "ln", "mkdir", "rmdir", "chmod", "mkfifo", "setsid", "unshare", "mount", "umount", "su", "timeout"),
)
FOLDERS = {"proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755, "etc": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}


def main() -> int:
    """Make the image; return the command's exit code."""
    image, *command = sys.argv[1:]
    with subprocess.Popen([*command, "import", "-", image], stdin=subprocess.PIPE) as importing:
        assert importing.stdin is not None
        with tarfile.open(fileobj=importing.stdin, mode="w|") as archive:
            for name, mode in FOLDERS.items():
                folder = tarfile.TarInfo(name)
                folder.type, folder.mode = tarfile.DIRTYPE, mode
                archive.addfile(folder)
            for name in ("bin", "lib", "lib64"):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
                archive.addfile(link)
            for source, name in sorted(_files()):
                archive.add(source, name, recursive=False)
        importing.stdin.close()
        return importing.wait()


def _files() -> set[tuple[str, str]]:
    """Return the files by their places in the image, as (source, place)."""
    ask = "import sysconfig; print(sysconfig.get_path('stdlib'), end='')"
    library = Path(subprocess.run([PYTHON, "-I", "-c", ask], capture_output=True, text=True, check=True).stdout)
    modules = [path for path in library.rglob("*") if path.is_file() and "test" not in path.parts]
    programs = [Path(found) for name in PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin"))]
    programs.append(Path(PYTHON))
    with_libraries = [path.resolve() for path in programs] + [path for path in modules if path.suffix == ".so"]
    files = {(str(path.resolve()), f"usr/bin/{path.name}") for path in programs}
    files |= {(str(path.resolve()), str(path).lstrip("/")) for path in modules}
    return files | {(str(Path(found).resolve()), _place(found)) for found in _libraries(with_libraries)}


def _libraries(files: list[Path]) -> Iterator[str]:
    """Yield the shared libraries that they load, the loader included."""
    said = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True).stdout
    yield from set(re.findall(r"(/\S+) \(0x", said))


def _place(library: str) -> str:
    return library.lstrip("/") if library.startswith("/usr") else f"usr{library}"


if __name__ == "__main__":
    sys.exit(main())
