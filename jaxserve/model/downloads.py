"""Downloads in processes of their own, which can be ended at any moment.

This file is also the script that they run in, which ends as soon as the process that started it
does, whatever ended that: nobody holds the other end of a pipe open then.
"""

import os
import runpy
import subprocess
import sys
import threading
from typing import Any


def run_download(program: str, *arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` in text mode, for a Python module or a .py file, which never outlives
    this process."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-P", __file__, str(read_end), program, *arguments]
    try:
        with subprocess.Popen(command, text=True, pass_fds=[read_end], **streams) as process:
            try:
                stdout, stderr = process.communicate()
            except BaseException:
                process.kill()
                process.wait()  # the caller may remove what it was writing
                raise
    finally:
        os.close(read_end)
        os.close(write_end)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _end_with_the_pipe(read_end: int) -> None:
    os.read(read_end, 1)
    os._exit(1)


def _main() -> None:
    read_end, program = int(sys.argv[1]), sys.argv[2]
    del sys.argv[:2]
    threading.Thread(target=_end_with_the_pipe, args=[read_end], daemon=True).start()
    run = runpy.run_path if program.endswith(".py") else runpy.run_module
    run(program, run_name="__main__")


if __name__ == "__main__":
    _main()
