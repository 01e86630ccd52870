#!/usr/bin/env bash
# Print the Python to make the virtual environment with: 3.12 or newer, with the venv module.
set -euo pipefail

fits() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

without_venv=""
mapfile -t pyenv_pythons < <(
    printf '%s\n' "${HOME:-}"/.pyenv/versions/3.1[2-9]*/bin/python | sort --version-sort --reverse
)
for candidate in python3.13 python3.12 python3 "${pyenv_pythons[@]}"; do
    # Under pyenv a command may exist and still not run, so only running it tells.
    fits "$candidate" || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
    without_venv=$candidate
done

if [[ -n $without_venv ]]; then
    version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "error: $without_venv lacks the venv module: apt-get install python$version-venv" >&2
else
    echo "error: no Python 3.12 or newer among python3.13, python3.12, python3 and" \
        "~/.pyenv/versions: on Debian 13 or Ubuntu 24.04 'apt-get install python3 python3-venv'," \
        "elsewhere 'pyenv install 3.13'" >&2
fi
exit 1
