"""A model's files from the Hugging Face hub, and a process that downloads them.

The hub's library downloads in a pool of threads, which the end of a process would wait for. So this
file is also a script, which may be killed: what it has got so far is where the next one goes on.
"""

import signal
import sys

_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
# Copies of the weights in other layouts, and what lies in subfolders.
_IGNORED = ["consolidated*", "*/*"]


def main(name: str) -> int:
    """Download what is missing of the model `name`, with its progress on stderr. Writes the model's
    folder to stdout; or why there is none, and returns 1."""
    # Ctrl-C is for the process that started this one. From here on: the next line takes a while.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=_FILES, ignore_patterns=_IGNORED
        )
    except Exception as error:  # the libraries raise nothing narrower
        sys.stdout.write(str(error) or type(error).__name__)
        return 1
    sys.stdout.write(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
