#!/usr/bin/env bash
# Makes the environment of a GPU node in $VENV (default .venv) from requirements/gpu.txt, as containers/Dockerfile does: run it on a
# node with the CUDA toolkit, cuDNN's headers and a C++ compiler, which Transformer Engine's torch binding is built with.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
[ ! -e "$VENV" ] || { echo "error: VENV=$VENV exists; remove it or name another folder" >&2; exit 2; }
command -v nvcc >/dev/null || { echo "error: no nvcc here: load the site's CUDA 13 module, or use containers/" >&2; exit 2; }
"$(tools/find_python.sh)" -m venv "$VENV"
"$VENV/bin/pip" install -q setuptools wheel ninja pybind11
"$VENV/bin/pip" install -q --no-deps -r <(grep -v '^transformer-engine-torch' requirements/gpu.txt)
NVTE_FRAMEWORK=pytorch "$VENV/bin/pip" install --no-build-isolation --no-deps -r requirements/gpu.txt
"$VENV/bin/pip" install -q --no-deps --no-build-isolation -e .
echo "setup_gpu: done"
