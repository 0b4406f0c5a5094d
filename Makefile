# Needs Python 3.11 or newer, and make. What a target installs goes into $(VENV), at its first use; the commands are those of the pages.
#     make example                  make test                  make test VENV=/tmp/fresh

PYTHON ?= python3
VENV ?= .venv

SHELL := bash
export PATH := $(abspath $(VENV))/bin:$(PATH)

ENVIRONMENT := $(VENV)/pyvenv.cfg
REQUIREMENTS := $(ENVIRONMENT) setup.cfg pyproject.toml constraints.txt
# Of what pip says: a line for each package, the large downloads, and the end.
PROGRESS := awk '/^Collecting|Downloading.*MB|^Installing|^Successfully/ { print substr($$0, 1, 100); fflush() }'

.PHONY: help example announced test lint types docs loops launch tests wheel

help: ## these lines
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

example: | announced $(VENV)/.installed-examples ## train a small model on two CPU processes, with balancing off and on
	accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml examples/finetune_long_documents.py

announced:
	@$(if $(wildcard $(VENV)/.installed-examples),,echo "First installs torch, transformers and what else the example needs into $(VENV).";) \
		echo "Then trains a small model in two processes, which takes one to two minutes. Nothing is printed for the first 20 seconds."

test: lint docs ## all that must hold for a change: the six below
	$(MAKE) --no-print-directory -j2 types loops launch
	$(MAKE) --no-print-directory tests

lint: $(VENV)/.installed-dev ## lint and format
	ruff check .
	ruff format --check .

types: $(VENV)/.installed-dev ## strict types of src/
	mypy

docs: $(VENV)/.installed-dev ## build the pages, if there are any to build; warnings are errors
	$(if $(wildcard mkdocs.yml),mkdocs build --strict)

loops: $(VENV)/.installed-dev ## compile the scheduler's loop, which else the processes of the tests do beside each other
	pytest -n 0 -q -m "slow or not slow" tests/schedule/test_compiled.py

launch: $(VENV)/.installed-dev ## the example, started as users start it
	pytest -n 0 -q -m slow tests/test_example.py -k the_example_trains

tests: $(VENV)/.installed-dev ## all tests but those marked slow
	pytest

wheel: $(VENV)/.installed-dev ## build wheel and sdist into dist/, and check what the index would read of them
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
