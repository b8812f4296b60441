# Each target does whatever set-up is missing. `make test` passes everything; `make demo` shows the system at work.
SHELL := /bin/bash
VENV := .venv
PYTHON_IN_VENV := "$(VENV)/bin/python"
PYTEST := OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest
PARTS := unit distributed engine system slurm
# Parts that hold tests today, in the order of PARTS.
PRESENT = $(foreach part,$(PARTS),$(if $(shell find tests/$(part) -name 'test_*.py'),$(part)))
SHARD ?= 1/1

.PHONY: setup slurm-packages demo smollm2 test test-fast test-full lint clean lock
setup: $(VENV)/.ready

$(VENV)/.ready: requirements/cpu.txt tools/setup.sh tools/find_python.sh pyproject.toml
	@VENV="$(VENV)" PYTHON="$(PYTHON)" tools/setup.sh

# A warm start, then asynchronous reinforcement learning; a table and a picture in runs/demo. Can be repeated.
demo: setup
	@if [ -f runs/demo_warmstart/model/config.json ]; then echo "demo: the warm start in runs/demo_warmstart is there already"; \
	else echo "demo: warm start, about a minute"; rm -rf runs/demo_warmstart; \
	    $(PYTHON_IN_VENV) -m recipes.pretrain configs/demo_warmstart.yaml; fi
	@if [ -e runs/demo ]; then echo "demo: removing runs/demo, an earlier demo"; rm -rf runs/demo; fi
	$(PYTHON_IN_VENV) recipes/run_local.py configs/demo.yaml

# A real pretrained model (135 M parameters) on GSM8K, a few steps on the CPU.
smollm2: setup
	$(PYTHON_IN_VENV) tools/fetch_smollm2.py
	@rm -rf runs/smollm2_gsm8k_cpu
	$(PYTHON_IN_VENV) recipes/run_local.py configs/smollm2_gsm8k_cpu.yaml run.num_steps=2

test: setup slurm-packages
	@set -e; for part in $(PRESENT); do echo "== tests/$$part"; $(PYTEST) tests/$$part; done

# Without the unit tests that start many processes.
test-fast: setup
	$(PYTEST) tests/unit -q --ignore tests/unit/rollout/test_supervisor.py --ignore tests/unit/rollout/test_imports.py

# make test-unit, test-distributed, ...: one part. For real ranks: torchrun --nproc-per-node 4 -m pytest tests/distributed
$(addprefix test-,$(PARTS)): test-%: setup
	$(PYTEST) tests/$*

test-slurm: slurm-packages

# The distribution's SLURM, where it may be installed; says what is skipped where it may not.
slurm-packages:
	@tests/slurm/install.sh

# Sweeps too; SHARD=2/5 runs the second fifth.
test-full: setup slurm-packages
	@set -e; for part in $(PRESENT); do echo "== tests/$$part"; $(PYTEST) tests/$$part -m "" --shard $(SHARD); done

lint: setup
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/mypy"
	"$(VENV)/bin/shellcheck" -x tools/*.sh slurm/*.sh tests/slurm/*.sh tests/slurm/stubs/* .ci/run

# Resolve the pinned lists anew from what they are made of.
RESOLVE := "$(VENV)/bin/uv" pip compile -q --python-version 3.12 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header
lock: setup
	$(RESOLVE) --override requirements/cpu-overrides.txt requirements/cpu.in -o requirements/cpu.txt
	$(RESOLVE) --config-file requirements/uv.toml requirements/gpu.in -o requirements/gpu.txt

clean:
	rm -rf "$(VENV)" runs .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
