# Streamhouse. `make` alone lists the targets; every target installs what it needs.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The first Python >= 3.11 among the names a machine may have it under; only read to make $(VENV).
AT_LEAST_3_11 := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13 python; do \
	$$name -c '$(AT_LEAST_3_11)' 2>/dev/null && echo $$name && break; done)

# An active environment of the user's, or another Spark, must not leak into ours.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME SPARK_HOME SPARK_CONF_DIR
unexport PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON
# Nor a wish for no byte code, which containers have: each of a thousand processes would compile
# all it imports, and pytest rewrite every assertion in each of its workers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | \
		awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# ---- Installing. A stamp an environment makes an up-to-date one cost nothing. ----

.PHONY: setup
setup: $(VENV)/.installed-dev ## Make .venv with everything that developing and testing needs

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Streamhouse needs Python 3.11 or later." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-dev: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV): about a minute on a new machine."
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,quickstart,connect]'
	@touch $(VENV)/.installed-dev $(VENV)/.installed-quickstart

$(VENV)/.installed-quickstart: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV): about a minute on a new machine."
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[quickstart]'
	@touch $@

.PHONY: java
java:
	@test -x "$${JAVA_HOME:+$$JAVA_HOME/bin/java}" || command -v java >/dev/null || \
		{ echo "Spark needs Java 17 or later: put java on PATH or set JAVA_HOME." >&2; exit 1; }

# ---- Using. ----

.PHONY: quickstart
quickstart: java $(VENV)/.installed-quickstart ## Flights through service, Iceberg and Spark
	$(BIN)/python examples/quickstart.py

# ---- Checking. ----

# So many processes share the tests, a file at a time; conftest.py puts the long ones first. Two
# cores have more than two do, which wait for a disk or for processes of their own a quarter of the
# time.
WORKERS ?= 3
SHARED := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
GATE := not long and (not integration or end_to_end)

# The folders of what `conftest.py` marks as `newcomer`.
NEWCOMER := tests/unit tests/golden tests/architecture integration/test_spark_batch.py

.PHONY: test
ifdef AREA
test: java setup ## Lint and what is quick: under 5 minutes. AREA=kafka: all of an area
	$(BIN)/python -m pytest tests integration --area $(AREA) -m "$(GATE)" $(SHARED)
else
test: java lint
	$(BIN)/python -m pytest $(NEWCOMER) -m "newcomer and not long" $(SHARED)
endif

.PHONY: gate
gate: test ## What CI runs: `make test`, then the rest of tests/ and integration's end-to-end part
	$(BIN)/python -m pytest tests integration -m "not newcomer and $(GATE)" $(SHARED)

.PHONY: unit
unit: setup ## Only tests/, without what starts a process: the loop while working
	$(BIN)/python -m pytest tests -m "not slow and not spark"

.PHONY: integration
integration: java setup ## Everything in integration/, with each foreign engine as a judge
	$(BIN)/python -m integration.judges.environment
	$(BIN)/python -m pytest integration

# Each Python has an environment of its own.
OTHER = .cache/$(notdir $(PYTHON))

.PHONY: test-python
test-python: java ## Unit tests, a light install and Spark end to end: PYTHON=python3.12
	@test -n "$(PYTHON)" || { echo "name a Python: make test-python PYTHON=python3.12" >&2; exit 1; }
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@test $(OTHER)/.installed -nt setup.cfg -a $(OTHER)/.installed -nt constraints.txt || { \
		echo "Installing into $(OTHER): about a minute on a new machine."; \
		$(OTHER)/bin/python -m pip --disable-pip-version-check install --quiet \
			--constraint constraints.txt --editable '.[dev,quickstart,connect]' && \
		touch $(OTHER)/.installed; }
	$(OTHER)/bin/python -m pytest tests/unit -m "not slow and not spark"
	$(OTHER)/bin/python -m pytest integration/test_light_install.py integration/test_spark_batch.py

# An earlier Spark leaves its sockets to the collector.
UNCLOSED := -W 'ignore:unclosed <socket:ResourceWarning' \
	-W 'ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning'

# Another Spark in front of all that .venv has.
OTHER_SPARK = .cache/spark-$(SPARK)
FILES ?= $(wildcard integration/test_spark_*.py)

.PHONY: test-spark
test-spark: java setup ## Spark's tests on another version: SPARK=4.1 [FILES=integration/...]
	@test -n "$(SPARK)" || { echo "name a version: make test-spark SPARK=4.1" >&2; exit 1; }
	@test $(OTHER_SPARK)/.installed -nt setup.cfg || { \
		echo "Installing into $(OTHER_SPARK): about a minute on a new machine."; \
		$(BIN)/python -m venv $(OTHER_SPARK) && \
		$(OTHER_SPARK)/bin/python -m pip --disable-pip-version-check install --quiet \
			'pyspark==$(SPARK).*' && \
		$(OTHER_SPARK)/bin/python -m pip --disable-pip-version-check install --quiet \
			--no-deps --editable . && \
		$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
			"$$($(OTHER_SPARK)/bin/python -c \
			'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_shared.pth" && \
		touch $(OTHER_SPARK)/.installed; }
	$(OTHER_SPARK)/bin/python -m pytest $(FILES) $(MARKED) $(UNCLOSED)

# The lowest version of each direct dependency, as setup.cfg says; what those need is the newest.
# `cluster` has the pyarrow of the client and of Spark, in front: the service needs a later one.
LOWEST := .cache/lowest
LOWEST_TOOLS := anyio aiokafka confluent-kafka hypothesis kafka-python packaging polars pytest \
	pytest-timeout pytest-xdist urllib3

$(LOWEST)/.installed: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing into $(LOWEST): about two minutes on a new machine."
	@$(BIN)/python -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet uv
	@$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct setup.cfg \
		--extra all --extra connect --extra kafka --extra otel --extra sql -o $(LOWEST)/lowest.txt
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python \
		-r $(LOWEST)/lowest.txt $(LOWEST_TOOLS)
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps -e .
	@$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct setup.cfg \
		--extra spark -o $(LOWEST)/cluster.txt
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps \
		--target $(LOWEST)/cluster "$$(grep ^pyarrow== $(LOWEST)/cluster.txt)"
	@touch $@

.PHONY: test-lowest
test-lowest: java $(LOWEST)/.installed ## Service, Kafka door and Spark with the lowest versions
	PYTHONPATH=$(CURDIR)/$(LOWEST)/cluster $(LOWEST)/bin/python -m pytest \
		tests/unit/core tests/unit/client tests/unit/lake \
		tests/unit/reading tests/unit/connector -m "not slow and not spark" \
		-p no:cacheprovider -W ignore::DeprecationWarning $(UNCLOSED)
	$(LOWEST)/bin/python -m pytest tests/service/test_client.py tests/service/test_key_tables.py \
		tests/service/test_transactions.py tests/service/test_unread_answers.py \
		tests/service/test_kafka_door.py tests/unit/reading/duckdb/test_duckdb_query.py
	PYTHONPATH=$(CURDIR)/$(LOWEST)/cluster $(LOWEST)/bin/python -m pytest \
		integration/test_spark_batch.py integration/test_spark_changes.py \
		integration/test_spark_stream.py $(UNCLOSED)

.PHONY: long
long: setup ## The tests of tests/ that `make gate` has no time for
	$(BIN)/python -m pytest tests -m long --timeout 900 $(SHARED)

.PHONY: thorough
thorough: java setup ## The properties with a hundred times the examples of `make gate` [SEED=n]
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest tests/property tests/simulation \
		integration/test_spark_queries.py --timeout 7200 \
		$(if $(SEED),--hypothesis-seed $(SEED)) $(SHARED)

MINUTES ?= 60
.PHONY: torture
torture: setup ## Kill services, lose disks, for MINUTES=60 [SEED=n] [ERAS=kind,...]; judge
	$(BIN)/python -m tests.torture.torture --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
		$(if $(ERAS),--eras $(ERAS))

.PHONY: drill
drill: java setup ## Lose the machine of an owner under load; say what happened to the second
	$(BIN)/python -m integration.drill

.PHONY: contenders
contenders: setup ## Kill and pause who want one journal for MINUTES=60 [SEED=n], judge them
	$(BIN)/python -m tests.torture.journal_kill --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: attack
attack: setup ## Damage every kind of file, send hostile requests, for MINUTES=60 [SEED=n]
	$(BIN)/python -m tests.attack.attack --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: load
load: setup ## A million appends, a thousand waiting clients, 200 tables: memory and answers
	$(BIN)/python -m tests.load.load

.PHONY: lint
lint: setup ## ruff (rules and format), mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

.PHONY: typecheck
typecheck: setup ## mypy --strict on the package
	$(BIN)/mypy

.PHONY: format
format: setup ## Format, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: setup ## Check the documents: links, and what they say about the code
	$(BIN)/python -m pytest tests/architecture/test_documents.py

.PHONY: pictures
pictures: setup ## Draw the documents' pictures of the status page again, with Chromium
	$(BIN)/python -m tests.unit.storage_service.server.status.pictures

# MkDocs is not in .venv: it reads our sources and imports nothing of ours.
SITE := .cache/site/environment
OUT ?= artifacts/site

$(SITE)/.installed: setup.cfg constraints.txt | $(BIN)/python
	@echo "Installing into $(SITE): half a minute on a new machine."
	@$(BIN)/python -m venv $(SITE)
	@$(SITE)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint constraints.txt $$($(BIN)/python docs/build_site.py --tools)
	@touch $@

.PHONY: site
site: $(SITE)/.installed ## Build the documentation site of this version into OUT=artifacts/site
	$(SITE)/bin/python docs/build_site.py --out $(OUT)

.PHONY: audit
audit: setup ## Known vulnerabilities of the pinned dependencies; asks the network
	@test -x .cache/audit/bin/pip-audit || { $(BIN)/python -m venv .cache/audit && \
		.cache/audit/bin/python -m pip install --quiet pip-audit; }
	.cache/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

.PHONY: bench
bench: java setup ## Run the benchmarks and write benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.run

# The peers are not in .venv: their environment has ours and them.
PEERS := .cache/peers

$(PEERS)/.installed: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(PEERS): about a minute on a new machine."
	@$(BIN)/python -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint constraints.txt --editable '.[peers]'
	@touch $@

.PHONY: peers
peers: $(PEERS)/.installed ## Small calls beside a peer from PyPI, into benchmarks/RESULTS.md
	$(PEERS)/bin/python -m benchmarks.run bench_small_calls

# Nor are the linters of deploy/, but for the small one: 170 MB that nothing else needs.
MANIFESTS := .cache/manifests

$(MANIFESTS)/.installed: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -m venv $(MANIFESTS)
	@$(MANIFESTS)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint constraints.txt --editable '.[manifests,dev]'
	@touch $@

.PHONY: manifests
manifests: $(MANIFESTS)/.installed ## Lint deploy/: Docker, Compose, Kubernetes, systemd
	$(MANIFESTS)/bin/python -m pytest tests/architecture/test_deploy.py

.PHONY: image
image: setup ## Build deploy/'s image, start it and compose.yaml with podman, as root
	@test -x .cache/image/compose/bin/podman-compose || { \
		$(BIN)/python -m venv .cache/image/compose && \
		.cache/image/compose/bin/python -m pip install --quiet podman-compose; }
	$(BIN)/python -m integration.image_trial

# ---- Packing. ----

.PHONY: build
build: setup ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build --outdir dist .

.PHONY: clean
clean: ## Remove what building and testing left, but not .venv
	rm -rf build dist src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf spark-warehouse metastore_db derby.log
	find connector storage_service tiering src tests integration examples benchmarks \
		-name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## Remove .venv and the judges' environments too
	rm -rf .venv .cache
