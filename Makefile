# Needs Python 3.11 or newer, and make. A target installs what it needs into $(VENV) when it first runs.
#     make example                  make test                  make test VENV=/tmp/fresh

PYTHON ?= python3
VENV ?= .venv

SHELL := bash
export PATH := $(abspath $(VENV))/bin:$(PATH)

ENVIRONMENT := $(VENV)/pyvenv.cfg
REQUIREMENTS := $(ENVIRONMENT) setup.cfg pyproject.toml constraints.txt
# Prints only some lines of pip's output: one per package, large downloads, and the end.
PROGRESS := awk '/^Collecting|Downloading.*MB|^Installing|^Successfully/ { print substr($$0, 1, 100); fflush() }'

.PHONY: help example announced test lint types docs loops launch tests wheel

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

example: | announced $(VENV)/.installed-examples ## train a small model on two CPU processes, and compare balancing off and on
	accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml examples/finetune_long_documents.py

announced:
	@$(if $(wildcard $(VENV)/.installed-examples),,echo "First installs torch, transformers and other packages into $(VENV).";) \
		echo "The example trains a small model in two processes for one to two minutes. It prints nothing for the first 20 seconds."

test: lint docs ## everything that a change must pass: the next six targets
	$(MAKE) --no-print-directory -j2 types loops launch
	$(MAKE) --no-print-directory tests

lint: $(VENV)/.installed-dev ## check lint and format
	ruff check .
	ruff format --check .

types: $(VENV)/.installed-dev ## check types of src/ strictly
	mypy

docs: $(VENV)/.installed-dev ## build the documentation, if mkdocs.yml exists; warnings are errors
	$(if $(wildcard mkdocs.yml),mkdocs build --strict)

loops: $(VENV)/.installed-dev ## compile the scheduler's loop, so that test processes need not all compile it
	pytest -n 0 -q -m "slow or not slow" tests/schedule/test_compiled.py

launch: $(VENV)/.installed-dev ## run the example with accelerate's launcher
	pytest -n 0 -q -m slow tests/test_example.py -k the_example_trains

tests: $(VENV)/.installed-dev ## run all tests except those marked slow
	pytest

wheel: $(VENV)/.installed-dev ## build wheel and sdist into dist/, and check their metadata
	python -m build --outdir dist
	twine check --strict dist/*

$(ENVIRONMENT):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-dev: $(REQUIREMENTS)
	set -o pipefail; pip install -c constraints.txt -e ".[dev]" | $(PROGRESS)
	touch $@

$(VENV)/.installed-examples: $(REQUIREMENTS)
	set -o pipefail; pip install -c constraints.txt -e ".[examples]" | $(PROGRESS)
	touch $@
