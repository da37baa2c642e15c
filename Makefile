# Every target sets up a fresh machine by itself. PYTHON picks the interpreter, MODEL and RANKS the deployment.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
MODEL  ?= data/k3-nano
RANKS  ?= 2
OUT    ?= out/day0
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.workbench-stamp
export GRADIO_ANALYTICS_ENABLED := False

.PHONY: help setup browser day0 test test-slow test-golden lab chat lint format bench notebooks device clean

help:            ## list the targets
	@grep -E '^[a-z0-9-]+: .*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP)  ## virtual environment with pinned versions

# torch goes first and alone, under its pin: asked for by another package it could bring a several-GB build of another kind.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebook,app,serve,structured,dev]'
	touch $@

# The browser test needs a real Chromium; where a package manager can bring it, it does.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	  echo "no chromium and no way to install it here: the browser test will be skipped"

day0: setup      ## acceptance run of MODEL on RANKS, report in OUT
	$(BIN)/workbench day0 $(MODEL) --ranks $(RANKS) --out $(OUT)

test: setup browser  ## everything but the slow suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=40 --durations-min=5 -m "not slow"

test-slow: setup browser  ## the slow suite alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

test-golden: setup  ## parity with the released network's outputs; GOLDEN=DIR for another folder
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/golden $(if $(GOLDEN),--golden $(GOLDEN))

lab: setup       ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks

chat: setup      ## chat with text and images in the browser
	$(BIN)/python -m apps.chat --model $(MODEL) --ranks $(RANKS)

lint: setup      ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy workbench

format: setup
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: setup     ## benchmarks, one table and one line of JSON each
	@set -e; for file in tests/benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file; done

notebooks: setup ## execute and strip every notebook
	cd notebooks && ../$(BIN)/jupytext --sync --execute *.py
	$(BIN)/nbstripout --keep-output --keep-id --extra-keys "metadata.widgets metadata.language_info cell.metadata.execution" notebooks/*.ipynb

device:          ## checks on the accelerator of this machine (or its CPU), with the python that is active
	bash tests/device/check.sh

clean:
	rm -rf $(VENV) out build dist *.egg-info
