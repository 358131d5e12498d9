# make train   install into .venv once, then train the example GPT (CONFIG, STEPS and ARGS change it)
# make test    the same .venv, then ruff and the tests, one case for each promise
# make test-long   the long ones: hundreds of kills, all pairs of checkpoints, real hosts, restarts
# make docs    the pages of docs/ and the API reference, into out/docs; needs no network and opens nothing
# make nodes   the programs that tests over real hosts, under MPI, Slurm and in a browser run, where they may be installed
# make suites  what Accelerate, Transformers and DeepSpeed test of DeepSpeed, over zero; SUITES is the folder of their source trees
# make programs    programs that others wrote, unchanged, behind the door at each stage; PROGRAMS is the folder of their source trees
# make report  the same .venv, then what is installed, which compiled kernels run here, and how fast
# make sanitize    the C++ tests of the CPU kernels, built with AddressSanitizer and UBSan
# make peers   a second environment, .venv-peers, in which benchmarks/kernels.py also meets DeepSpeed
# make gpu     what only a GPU can show, in parts: its kernels, the engine's tests on it, the benchmarks; PART names some,
#              PART=first, second and third those for a few minutes each; OUT is the folder of what it finds
# make clean   remove both environments and everything that was built

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
PEERS := .venv-peers
DEEPSPEED := deepspeed==0.19.8

CONFIG ?= examples/gpt/zero3.json
STEPS ?=
ARGS ?=
NVIDIA := $(shell nvidia-smi -L 2>/dev/null)
# Processes to train with. Empty means all GPUs of this machine, which is what `zero run` does by itself.
NPROC ?= $(if $(NVIDIA),,2)

# How many files of tests run side by side. One leaves a core of two idle whenever ranks wait for each other.
WORKERS ?= 2

# The versions in constraints.txt hold for what is installed and also for what the build itself needs. pip reads the
# second from PIP_CONSTRAINT up to 25.2 and from PIP_BUILD_CONSTRAINT after that.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train test test-long docs suites programs nodes report sanitize gpu peers clean

train: $(STAMP)
	$(VENV)/bin/zero run $(if $(NPROC),--num_gpus $(NPROC)) examples/gpt/train.py --config $(CONFIG) \
		$(if $(STEPS),--steps $(STEPS)) $(ARGS)

# Real nodes, MPI, Slurm and a browser are tested where the system has the programs for it. They are installed where that is
# allowed, as in the containers of a CI; elsewhere those tests skip, and the end of the run says so.
nodes:
	@sh tests/real_nodes.sh

# A process of tests that dies, or is ended because a test hangs, ends the run: started again it would meet the same test.
# Tests start hundreds of processes: each one would compile this library anew where Python is told to keep nothing.
test test-long: export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --max-worker-restart 0 --dist loadfile \
	--no-loadscope-reorder --durations 40

test: $(STAMP) nodes
	$(VENV)/bin/ruff check .
	$(PYTEST) $(ARGS)

# Transformers and PEFT import bitsandbytes wherever they find it, for a second or more, and Ray has 200 MB: no short test
# needs them.
test-long: $(STAMP) nodes
	$(VENV)/bin/python -m pip install --quiet bitsandbytes "ray[train]"
	$(PYTEST) -m long $(ARGS)

docs: $(STAMP)
	$(VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going docs out/docs
	@echo "out/docs/index.html"

suites: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --editable ".[suites]"
	$(VENV)/bin/python tests/suites/run_suites.py $(SUITES)

programs: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --editable ".[programs]"
	$(VENV)/bin/python tests/suites/run_programs.py $(PROGRAMS)

report: $(STAMP)
	$(VENV)/bin/zero report $(ARGS)

sanitize: $(STAMP)
	$(VENV)/bin/python csrc/tests/sanitize.py $(ARGS)

# Where there is a GPU, PYTHON is the one whose torch sees it, and nothing is installed. Elsewhere a stand-in is compiled.
gpu: $(if $(NVIDIA),,$(STAMP))
	$(if $(NVIDIA),$(PYTHON),$(VENV)/bin/python) benchmarks/gpu.py $(PART) $(if $(OUT),--out "$(OUT)") $(ARGS)

# DeepSpeed has no place in .venv: it brings libraries of its own and builds C++ where it is first used (minutes), which
# is done here, so that no benchmark is the first. Its sources need ninja on the PATH.
peers:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --editable . $(DEEPSPEED) ninja
	PATH="$(CURDIR)/$(PEERS)/bin:$$PATH" $(PEERS)/bin/python benchmarks/kernel_peers.py

# Compiled code is part of the installation, so its sources are, too.
$(STAMP): pyproject.toml constraints.txt $(wildcard setup.py) $(wildcard csrc/*.*)
	@echo "installing torch and the rest into $(VENV), and compiling the kernels: about two minutes, the first time only"
	$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --progress-bar off --editable ".[docs,example,test]" > $(VENV)/install.log 2>&1 & pid=$$!; \
	while kill -0 $$pid 2> /dev/null; do sleep 5; tail -n 1 $(VENV)/install.log | cut -c 1-100; done; \
	wait $$pid || { cat $(VENV)/install.log; exit 1; }
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f zero/_cpu*.so zero/_cuda*.so
	find zero tests examples benchmarks csrc -name __pycache__ -type d -prune -exec rm -rf {} +
