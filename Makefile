# make train and make test are the two commands; make help lists the rest.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements.lock
DEV_LOCK := requirements-dev.lock
PETASTORM := .venv-petastorm
PETASTORM_LOCK := requirements-petastorm.txt
CONFIG ?= conf/digits.toml

# The Spark of .venv and no other, with conf/log4j2.properties, and one Python for driver and
# workers: without PYSPARK_PYTHON workers would take the first python3 of the PATH.
unexport SPARK_HOME
# What Python has compiled it keeps: without that each new worker compiles all of torch again.
unexport PYTHONDONTWRITEBYTECODE
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
export SPARK_CONF_DIR ?= $(CURDIR)/conf
SUBMIT := $(BIN)/spark-submit

.DEFAULT_GOAL := help
.PHONY: help setup tools train evaluate predict test test-all promises lint format types docs picture record-notebooks unit plain
.PHONY: gangs spark pages connect cluster cluster-gpu notebooks test-hdfs standalone petastorm
.PHONY: archive package versions bench lock clean prerequisites faults soak competing every-step fuzz

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

prerequisites:
	@.ci/check_prerequisites.sh >/dev/null

# Each step leaves a copy of what it was made from, so a second run does nothing, also offline.
# uv installs, or else pip (.ci/install.py); INSTALLER=pip takes pip at once.
setup: prerequisites ## make .venv with what training needs: the versions of requirements.lock
	@if [ ! -x $(BIN)/python ]; then \
		echo "making $(VENV)"; \
		"$$(.ci/check_prerequisites.sh)" -m venv $(VENV); \
	fi
	@if ! cmp -s $(LOCK) $(VENV)/installed.lock; then \
		echo "installing the packages of $(LOCK) into $(VENV)"; \
		$(BIN)/python .ci/install.py -r $(LOCK) && cp $(LOCK) $(VENV)/installed.lock; \
	fi
	@if ! cmp -s setup.py $(VENV)/installed.setup; then \
		echo "installing sparkdl into $(VENV)"; \
		PYTHONWARNINGS=ignore $(BIN)/python .ci/install.py --no-build-isolation --no-deps \
			--editable . \
			&& cp setup.py $(VENV)/installed.setup; \
	fi

# These are compiled: pytest would take what a first import warns of for an error.
tools: setup ## add what tests and development need: the versions of requirements-dev.lock
	@if ! cmp -s $(DEV_LOCK) $(VENV)/installed-dev.lock; then \
		echo "installing the packages of $(DEV_LOCK) into $(VENV); this takes some minutes"; \
		$(BIN)/python .ci/install.py --compile -r $(DEV_LOCK) \
			&& cp $(DEV_LOCK) $(VENV)/installed-dev.lock; \
	fi

# Of Spark's classes as this Java has loaded them: it spares each JVM of the tests four seconds.
ARCHIVE := build/spark.jsa
JAVA = $${JAVA_HOME:+$$JAVA_HOME/bin/}java
archive: tools ## Spark's classes in a file, with which JVMs of tests start faster
	@mkdir -p build
	@if ! { [ -f $(ARCHIVE) ] && $(JAVA) -version; cat $(LOCK); } 2>&1 \
			| cmp -s - $(ARCHIVE).made-from; then \
		echo "making $(ARCHIVE), with which Spark starts faster"; \
		$(BIN)/python -m tests.jvm >$(ARCHIVE).log 2>&1 \
			&& { $(JAVA) -version; cat $(LOCK); } >$(ARCHIVE).made-from 2>&1 \
			|| echo "there is none, so the tests take longer; see $(ARCHIVE).log"; \
	fi

data/digits: | setup
	@$(BIN)/python jobs/digits.py --output $@

train: setup data/digits ## train a small network on handwritten digits and test it
	@$(SUBMIT) jobs/train.py --config $(CONFIG)

evaluate: setup data/digits ## measure the trained network on held-out digits
	@$(SUBMIT) jobs/evaluate.py --config conf/evaluate.toml

predict: setup data/digits ## write the trained network's predictions
	@$(SUBMIT) jobs/predict.py --config conf/predict.toml

# Tests run in parts, JOBS of them at a time and the long ones first; PARTS="cluster faults" names
# some. tests/suite.py runs them, runs once more what failed, and says how long each took. make test
# leaves out what is slow, unless it is the proof of a promise of the README; HDFS=skip leaves out
# what needs Hadoop's jars. LIMIT: seconds for each part.
JOBS ?= 2
SELECT ?= not bench and (promise or not slow)
PYTEST := $(BIN)/python -m pytest
CHANGE := lint spark plain gangs cluster faults pages types notebooks test-hdfs connect docs package
ALL := lint spark cluster faults pages notebooks test-hdfs plain gangs connect standalone petastorm \
	cluster-gpu types docs package
ifneq (,$(filter-out $(ALL),$(PARTS)))
$(error PARTS: there is no $(filter-out $(ALL),$(PARTS)); there are: $(ALL))
endif
SUITE = $(BIN)/python -m tests.suite --jobs $(JOBS) $(if $(PARTS)$(filter command% environment%,$(origin SELECT)),,--proof)

test: LIMIT ?= 1200
test: archive ## what a change can break; what the continuous integration runs
	@FAULTS="$(SELECT)" $(SUITE) --limit $(LIMIT) $(or $(PARTS),$(CHANGE))

test-all: LIMIT ?= 3600
test-all: archive ## every test there is; PARTS="cluster faults" some of them
	@-.ci/get_chromium.sh >/dev/null
	@SELECT="not bench" $(SUITE) --limit $(LIMIT) $(or $(PARTS),$(ALL))

promises: tools ## what the README promises, and the test that proves it
	@$(BIN)/python -m tests.promises

lint: tools ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: tools ## ruff: repair what can be repaired
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: tools ## mypy, strict, on the package
	@$(BIN)/mypy

# Every warning fails the build; -E, since what comes from docstrings is not told to be new.
# The builder of Markdown, and the pages that it makes of the docstrings.
REFERENCE = $(BIN)/python -m sphinx -W --keep-going -E -q -b markdown -d build/reference/doctrees docs/reference build/reference/api

reference: tools ## docs/api anew, from the docstrings
	@$(REFERENCE)
	@cp build/reference/api/*.md docs/api/

docs: tools ## the documentation as a site in docs/_build/html; fails if docs/api is not as the docstrings are
	@rm -rf build/reference
	@$(REFERENCE)
	@diff -r docs/api build/reference/api || { echo "docs/api is old: run make reference"; exit 1; }
	@$(BIN)/python -m sphinx -W --keep-going -n -E -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

picture: tools ## docs/report.png anew, from a fit on digits
	@$(BIN)/python -m docs.draw_report

unit: tools ## the tests of TESTS, as TESTS=tests/sync, slow ones too
	@-.ci/get_chromium.sh >/dev/null
	@$(PYTEST) -m "not bench" $(TESTS)

plain: tools ## the tests that need neither Spark nor several processes
	@$(PYTEST) -m "not spark and not gang and ($(SELECT))" $(TESTS)

gangs: tools ## the tests with several processes, without Spark
	@$(PYTEST) -m "gang and not spark and ($(SELECT))" $(TESTS)

spark: tools ## the tests in a Spark session of two slots
	@$(PYTEST) -m "spark and ($(SELECT))" $(addprefix --ignore=,$(PAGES)) $(TESTS)

PAGES := tests/docs tests/models
pages: tools ## the pages' code blocks and commands, and what networks learn, in another session
	@$(PYTEST) -m "spark and ($(SELECT))" $(PAGES)

connect: tools ## what Spark Connect may do otherwise, on Spark Connect
	@SPARKDL_TEST_SPARK=connect $(PYTEST) -m "$(SELECT)" tests/test_connect.py \
		$$($(BIN)/python -m tests.on_connect)

# Clusters of several executors need a Spark context of their own, hence a pytest of their own.
cluster: tools ## lost workers and executors, on a local cluster of two executors
	@$(PYTEST) -m "$(SELECT)" tests/cluster

# Hosts are namespaces, which root may make; without them, tests that need hosts are skipped.
FAULTS ?= not bench
faults: tools ## losses in every phase, on three hosts of this machine
	@rm -f build/faults.jsonl
	@$(PYTEST) -m "$(FAULTS)" tests/faults
	@$(BIN)/python -m tests.faults.table

soak: tools ## fits, checkpoints and reports in numbers that would show a leak; make test-all has a tenth
	@SOAK=1 $(PYTEST) -m "not bench" tests/soak

every-step: tools ## a loss at every step and in every phase, by kind and mode; make test-all has a tenth
	@rm -f build/every_step.jsonl
	@EVERY_STEP=1 $(PYTEST) tests/cluster/test_every_step.py
	@$(BIN)/python -m tests.cluster.every_step_table

competing: tools ## three gangs and a query on two slots, in five orders; make test-all has two gangs
	@$(PYTEST) tests/competing

FUZZ ?= 5000
fuzz: tools ## FUZZ files of each kind that somebody has changed at will; make test-all has sixty
	@FUZZ=$(FUZZ) $(PYTEST) tests/fuzz

cluster-gpu: tools ## GPUs that do not exist, on a local cluster
	@$(PYTEST) -m "$(SELECT)" tests/cluster_gpu

# Each notebook, and each file of tests that needs a kernel, has a Spark of its own.
notebooks: tools ## the notebooks, and the tests that need a kernel of Jupyter
	@$(PYTEST) -m "$(SELECT)" tests/notebooks

record-notebooks: tools ## run the notebooks, and keep in them what they show
	@$(BIN)/python .ci/record_notebooks.py

# petastorm runs with older versions only, so it has an environment of its own. That shows as well
# that the package works with the oldest pyarrow and numpy of setup.py, and with Spark 4.0.
# Its pyarrow has no build for Python 3.13.
petastorm: prerequisites ## the tests with petastorm, in .venv-petastorm
	@python="$$(.ci/check_prerequisites.sh)"; \
	if ! "$$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		echo "petastorm needs Python 3.11 or 3.12: its tests are left out"; exit 0; \
	fi; \
	if ! cmp -s $(PETASTORM_LOCK) $(PETASTORM)/installed.lock; then \
		echo "installing the packages of $(PETASTORM_LOCK) into $(PETASTORM)"; \
		"$$python" -m venv --clear $(PETASTORM) \
			&& $(PETASTORM)/bin/python .ci/install.py --compile -r $(PETASTORM_LOCK) \
			&& $(PETASTORM)/bin/python .ci/install.py --compile --no-deps petastorm==0.13.1 \
			&& cp $(PETASTORM_LOCK) $(PETASTORM)/installed.lock || exit 1; \
	fi; \
	PYSPARK_PYTHON=$(CURDIR)/$(PETASTORM)/bin/python PYTHONPATH=$(CURDIR) \
		$(PETASTORM)/bin/python -m pytest -m "not bench and not slow" \
		tests/petastorm tests/data/sources/test_parquet.py tests/data/test_arrow_arrays.py \
		tests/inference/test_predict.py

# With the oldest and with the newest packages of the ranges, each in an environment that is made anew
# in build/versions. torch is that of .venv, since others may exist as builds for CUDA only, which
# are gigabytes large: CUDA=1 takes the oldest and the newest of its range, whatever their build.
# NEWEST_PYTHON=python3.13 is the Python of the environment with the newest packages.
versions: tools ## train and predict with the oldest and the newest versions that setup.py allows
	@$(PYTEST) -rP tests/versions

# The first run fetches Hadoop's jars with pip and apt-get into a cache (tests/hdfs/jars.py).
test-hdfs: tools ## the tests against a real HDFS
	@$(PYTEST) -m "$(SELECT)" tests/hdfs

# Its environment, .venv-package, gets the core's dependencies with the first run.
package: tools ## build wheel and sdist, and try the wheel in an environment of its own
	@$(PYTEST) -m "$(SELECT)" tests/packaging

# The cluster of docker/compose.yaml as plain processes: HDFS, master, workers, history server.
standalone cluster-gpu: SELECT := not bench
standalone: tools ## a job on a real standalone cluster
	@$(PYTEST) -m "$(SELECT)" tests/standalone

bench: tools ## compare the speed with torchrun, TorchDistributor and others; see benchmarks/
	@for name in importing checkpoint data feeding larger transform fit loop allreduce compression parameter_server \
		rounds strategies networks runner explain goodput elasticity elastic_gang mesh scale; do $(BIN)/python benchmarks/$$name.py || exit 1; done
	@$(BIN)/python benchmarks/networks.py --workers 1

lock: tools ## write both locks anew from the ranges of setup.py
	@$(BIN)/python .ci/lock.py $(LOCK) $(DEV_LOCK)

clean: ## remove what was built, trained and written, and .venv
	rm -rf $(VENV) $(PETASTORM) .venv-package build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -rf data models runs artifacts spark-warehouse metastore_db derby.log
