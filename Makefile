# make train   install into .venv once, then train the example GPT (CONFIG, STEPS and ARGS change it)
# make test    the same .venv, then ruff and pytest
# make clean   remove .venv and everything that was built

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

CONFIG ?= examples/gpt/zero3.json
STEPS ?=
ARGS ?=
# Processes to train with. Empty means all GPUs of this machine, which is what `zero run` does by itself.
NPROC ?= $(if $(shell nvidia-smi -L 2>/dev/null),,2)

# The versions in constraints.txt hold for what is installed and also for what the build itself needs. pip reads the
# second from PIP_CONSTRAINT up to 25.2 and from PIP_BUILD_CONSTRAINT after that.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train test clean

train: $(STAMP)
	$(VENV)/bin/zero run $(if $(NPROC),--num_gpus $(NPROC)) examples/gpt/train.py --config $(CONFIG) \
		$(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/python -m pytest $(ARGS)

# Compiled code is part of the installation, so its sources are, too.
$(STAMP): pyproject.toml constraints.txt $(wildcard setup.py) $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable ".[example,test]"
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f zero/_cpu*.so zero/_cuda*.so
	find zero tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
