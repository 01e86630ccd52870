"""Downloads in processes of their own, which can be ended at any moment."""

import atexit
import subprocess
from collections.abc import Sequence
from typing import Any


def run_download(command: Sequence[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` in text mode, but the command never outlives this process's end, not even
    where the caller is a daemon thread, which nobody waits for."""
    with subprocess.Popen(command, text=True, **streams) as process:
        atexit.register(process.kill)
        try:
            stdout, stderr = process.communicate()
        except BaseException:
            process.kill()
            process.wait()  # the caller may remove what it was writing
            raise
        finally:
            atexit.unregister(process.kill)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
