# Every target sets up what it needs: a virtual environment in .venv with requirements-dev.txt and this package.
# PYTHON=... uses an environment of your own as it is.  TORCH=2.11, 2.12, 2.14 or 2.15 uses another supported torch (in
# .venv-torch2.11 and so on).

TORCH ?= 2.13
ifeq ($(TORCH),2.13)
VENV := .venv
REQUIREMENTS := requirements-dev.txt
else
VENV := .venv-torch$(TORCH)
REQUIREMENTS := requirements-dev-torch$(TORCH).txt
endif

# A GPU machine may have its own torch and no registry: there the python at hand and the editable install are enough.
GPU_PYTHON := $(or $(PYTHON),python3)

# The documentation is built from sources and docstrings, without torch.
DOCS_PYTHON := $(or $(PYTHON),.venv-docs/bin/python)
DOCS_READY := $(if $(PYTHON),,.venv-docs/.ready)

ifdef PYTHON
READY :=
else
PYTHON := $(CURDIR)/$(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: setup demo test test-torch test-models test-gpu lint format bench docs

setup: $(READY)

$(VENV)/.ready: $(REQUIREMENTS) requirements-tools.txt pyproject.toml tools/setup.sh
	tools/setup.sh $(VENV) $(REQUIREMENTS)
	touch $@

demo: $(READY)
	$(PYTHON) -m examples.demo

test: $(READY)
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not full"

# What a version of torch or triton can break: adoption, caches, how graphs look, are rewritten and cut in two, lowering, and compiled
# kernels with their budgets.  Left out is what is no matter of versions (the package's files, settings, broken packages,
# failing compilations), and the kernels that the planner can choose: those of the budgets in other combinations.
test-torch: $(READY)
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not full" -k "not broken" \
		$(foreach name,autoload cache compat embeddings saved switch toolchain,tests/test_adoption_$(name).py) \
		$(foreach name,gqa masks math_path models packed replace rewrite sites training,tests/test_matching_$(name).py) \
		$(foreach name,data_masks dropout forward hopper packed portable segments,tests/test_lowering_$(name).py) \
		$(foreach name,cached dump explain traces,tests/test_observe_$(name).py) \
		tests/test_partitioner.py tests/test_partitioner_flops.py \
		$(foreach name,budgets hopper_budgets hopper_data_budgets hopper_dropout_budgets hopper_forward_budgets hopper_placed_budgets,tests/test_kernels_$(name).py)

# What takes long: every family of models with every kind of inputs, and more compiled and interpreted kernels.  35 minutes.
test-models: $(READY)
	$(PYTHON) -m pytest -m full

# Only files with such tests, which need nothing but torch, transformers and pytest: a GPU machine may lack what the others import.
test-gpu:
	$(GPU_PYTHON) -m pytest -m gpu $(shell grep -lE '\bmark\.gpu\b|\bMARKS\b' tests/test_*.py)

# mypy needs the installed layout, where lowering/ and kernels/ lie inside the package.
lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	rm -rf build
	$(PYTHON) -m pip install -q --no-index --no-build-isolation --no-deps --target build/installed .
	cd build/installed && $(PYTHON) -m mypy --strict --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
		-p dash_inductor -m _dash_inductor_autoload -m _dash_inductor_state

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(READY)
	$(PYTHON) -m benchmarks.import_time

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS_PYTHON) -m mkdocs build --strict --quiet

.venv-docs/.ready: requirements-docs.txt
	$(or $(BASE_PYTHON),python3) -m venv .venv-docs
	@echo "installing what builds the documentation"
	.venv-docs/bin/python -m pip install -q -r requirements-docs.txt
	touch $@
