# `make demo` and `make test` work on a fresh clone with python3 (3.11+), make and a C++ compiler.
# The first call creates .venv. Later calls reuse it until pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SERVICES := $(VENV)/.services
SLURM := .cache/slurm
SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 libnuma1
SCHEMAS := .cache/schemas
DOCS := .cache/docs
DOCS_TESTS ?= tests/docs
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable

# Two processes share the test files, and each has its own pool of ranks. `make test PARALLEL=` uses one process.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder

# Tests start hundreds of processes. Without cached bytecode, each process would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install browser slurm schemas demo test test-main test-more test-storage test-engines test-full test-kernels gpu docs site docs-code lint style types format clean

help:
	@echo 'make install       create .venv with roomier, its command and all tools'
	@echo 'make demo          train a small GPT on the standard library, resume it, sample from it'
	@echo 'make test          lint, types, layers and the main tests of each feature'
	@echo 'make test-more     the tests marked more; CI runs a third of them for each commit'
	@echo 'make test-storage  the tests with storage servers, streams, notebooks, sweeps and a browser'
	@echo 'make test-engines  the tests of runs that Ray Train, torchrun and SLURM restart'
	@echo 'make test-full     lint and all tests, with the tests marked slow'
	@echo 'make test-kernels  the numerical tests with the CPU kernels of other processors'
	@echo 'make gpu           the device tests and the benchmarks on the GPU of this machine'
	@echo 'make site          build the documentation in site/, and check links and names'
	@echo 'make docs          the same, and run the code of its pages'
	@echo 'make lint          ruff, mypy and import-linter'
	@echo 'make format        let ruff rewrite the files'
	@echo 'make clean         remove .venv, caches and runs'

# Python compiles modules when they are imported. Without --no-compile, pip compiles all modules of all packages.
install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "roomier needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(MAKE) --no-print-directory browser slurm
	@touch $@

# Some tests open the planner's page in a browser. If none is installed, install Debian's chromium. If that fails, these
# tests are skipped with a reason.
browser:
	@for each in $(BROWSERS); do command -v $$each >/dev/null 2>&1 && exit 0; done; \
	[ "$$(id -u)" = 0 ] && grep -qs '^ID=debian' /etc/os-release && command -v apt-get >/dev/null 2>&1 || exit 0; \
	echo 'no browser found: installing chromium for the tests of the page'; \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 \
	|| echo 'chromium could not be installed: the tests of the page are skipped'

# Some tests submit jobs to SLURM. Its packages are unpacked but not installed, because Lightning warns if srun is on the
# PATH. If the packages cannot be downloaded, these tests are skipped with a reason.
slurm:
	@[ -d $(SLURM)/usr ] || ! grep -qs '^ID=debian' /etc/os-release || ! command -v apt-get >/dev/null 2>&1 && exit 0; \
	mkdir -p $(SLURM)/packages && cd $(SLURM)/packages; \
	{ { apt-get download $(SLURM_PACKAGES) || { apt-get update && apt-get download $(SLURM_PACKAGES); }; } \
	  && for each in *.deb; do dpkg -x $$each .. || exit 1; done; } >/dev/null 2>&1 \
	|| echo 'SLURM could not be downloaded: the tests that submit jobs are skipped'

# Some tests validate manifests with the schemas of their launchers, whose packages conflict with the ones in .venv.
schemas: $(SCHEMAS)/.installed

$(SCHEMAS)/.installed: tests/engines/requirements.txt
	$(PYTHON) -m venv $(SCHEMAS)
	$(SCHEMAS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r tests/engines/requirements.txt
	@touch $@

# With PASSIVE, waiting threads sleep. If other programs share the cores, spinning threads take four times as long.
demo: install
	OMP_WAIT_POLICY=passive $(BIN)/python examples/demo.py

# mypy uses one core for more than a minute, so the tests run at the same time.
test: style
	@$(MAKE) --no-print-directory --jobs 2 types test-main

# The tests of third-party projects are all marked `more`, and their imports take seconds.
test-main: install
	$(BIN)/python -m pytest $(PARALLEL) -m 'not more and not slow and not services' --ignore=tests/third_party

# PART=1/3 selects the first third of the tests.
test-more: install
	ROOMIER_TEST_PART=$(PART) $(BIN)/python -m pytest $(PARALLEL) -m 'more and not slow and not services'

# A storage server, Jupyter, Optuna and Ray bring 70 packages along, so only these tests install them. litdata requires
# torchvision, whose import fails with a CPU build of torch, but uses it only for images.
test-storage: $(SERVICES)
	$(BIN)/python -m pytest $(PARALLEL) -m 'services and not slow' --ignore=tests/engines

# An engine starts many processes, so only one process runs tests.
test-engines: $(SERVICES) $(SCHEMAS)/.installed
	$(BIN)/python -m pytest -m 'not slow' tests/engines

$(SERVICES): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,services]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps litdata obstore torchft
	@touch $@

test-full: lint $(SERVICES)
	$(BIN)/python -m pytest $(PARALLEL)

test-kernels: install
	$(BIN)/python tests/kernels/each_setting.py $(PARALLEL)

# The benchmarks run even if a device test fails. Both take at most 12 minutes, and a repetition skips completed parts.
ACCELERATOR ?= gpu
DEVICE_TESTS := tests/device/test_real_device.py

gpu: install
	@failed=0; \
	ROOMIER_TEST_ACCELERATOR=$(ACCELERATOR) timeout 180 $(BIN)/python -m pytest $(DEVICE_TESTS) || failed=1; \
	$(BIN)/python -m benchmarks gpu --json --accelerator $(ACCELERATOR) $(GPU_OPTIONS) || failed=1; \
	exit $$failed

docs: site docs-code

# The tools of the site have their own virtual environment, without torch. Zensical builds the site. MkDocs also reports,
# for example, pages without a place in the navigation. All problems are reported before the target fails. Zensical's
# option --clean would remove all folders of .cache.
site: $(DOCS)/.installed
	@mkdir -p .cache && find .cache -maxdepth 1 -type f -delete
	@failed=0; \
	$(DOCS)/bin/zensical build --strict || failed=1; \
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --site-dir .cache/mkdocs || failed=1; \
	$(DOCS)/bin/python -m tests.docs.check site || failed=1; \
	exit $$failed

# The code of the other pages takes minutes and runs in test-more.
docs-code:
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m pytest -q -m 'not more and not slow' $(DOCS_TESTS); \
	else echo 'the code of the pages was not run, because it requires make install'; fi

$(DOCS)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

lint: style types

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .cache build dist runs site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
