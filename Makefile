# Each target is one line that calls a script or the controller's CLI.
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# The clone's own Python, with what checks, tests and benches need; `plain`: but for PyTorch.
python = compose/machine/venv.sh && .venv/bin/python
plain = compose/machine/venv.sh packages && NO_MKDOCS_2_WARNING=1 .venv/bin/python
# $(call flag,NAME,OPTION): the option where the variable is 1.
flag = $(if $(filter-out 0 1,$($(1))),$(error $(1): expected 1 or nothing, found "$($(1))"),$(if $(filter 1,$($(1))),$(2)))
.PHONY: help up down scale deploy rollback status why plan events logs validate build machine test test-all bench bench-llm simulate docs docs-serve lint fmt

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: ## start the stack and wait until every service serves: [APPS="echo recsys"] [GPU=1]
	@./pierhead up --apps "$(APPS)" --gpu "$(GPU)"

down: ## stop and remove the stack, replicas included; VOLUMES=1 removes its volumes too; FORCE=1: another clone's stack
	@./pierhead down $(call flag,VOLUMES,--volumes) $(call flag,FORCE,--force)

scale: ## set a service's number of replicas: SERVICE=ranker N=4; N=auto takes it back
	@./pierhead scale "$(SERVICE)" "$(N)"

deploy: ## roll out what the files and images say now, and wait: [SERVICE=ranker]
	@./pierhead deploy $(SERVICE)

rollback: ## go back to an earlier version of a service: SERVICE=ranker [TO=<version>]
	@./pierhead rollback "$(SERVICE)" $(if $(TO),--to "$(TO)")

status: ## show services, replicas and GPUs, and what is wrong
	@./pierhead status

why: ## explain a service's state: SERVICE=ranker
	@./pierhead why "$(SERVICE)"

plan: ## show what the controller would do now, without doing it
	@./pierhead plan

events: ## show what happened, newest last, with causes
	@./pierhead events

logs: ## show a service's last log lines: SERVICE=ranker; without SERVICE, the stack's own
	@./pierhead logs $(SERVICE)

validate: ## check the compose files without changing anything
	@./pierhead validate

build: ## build the images: [APPS="echo recsys"] [GPU=1]
	@./pierhead build-images --apps "$(APPS)" --gpu "$(GPU)"

machine: ## prepare this machine: Docker Engine, Compose plug-in, base images
	@compose/machine/engine.sh && compose/machine/base-images.sh

test: ## run the checks and the tests of every promise
	@$(python) -m tests

test-all: ## run the long tests too: real vLLM, restarts of the engine, long rollouts, soak
	@$(python) -m tests all

bench: ## compare with Ray Serve: [QUICK=1] [MODE=processes] [ROUNDS=3] [SECONDS=5] [ONLY=echo,open] [PEER=0]
	@$(python) -m tests.bench.prepare "MODE=$(MODE)" "ROUNDS=$(ROUNDS)" "SECONDS=$(SECONDS)" "ONLY=$(ONLY)" "QUICK=$(QUICK)" "PEER=$(PEER)" "WATCH=$(WATCH)" "DEVICE=$(DEVICE)" "OUT=$(OUT)"

bench-llm: ## compare LLM serving with Ray Serve LLM: [QUICK=1] [ROUNDS=3] [SECONDS=6] [ONLY=overhead,linear] [PEER=0]
	@$(python) -m tests.bench.llm.prepare "ROUNDS=$(ROUNDS)" "SECONDS=$(SECONDS)" "ONLY=$(ONLY)" "QUICK=$(QUICK)" "PEER=$(PEER)" "OUT=$(OUT)"

simulate: ## try autoscaling on a trace: TRACE=step:10x [SERVICE=ranker] [OUT=simulation.png] [OPTIONS="--help"]
	$(if $(TRACE),,$(error simulate: name a trace, a shape or a file. Example: make simulate TRACE=step:10x SERVICE=ranker. \
	All shapes and options: make simulate TRACE=step OPTIONS=--help))
	@$(plain) -m simulator "$(TRACE)" $(SERVICE) --plot "$(or $(OUT),simulation.png)" $(OPTIONS)

docs: ## build the documentation into site/, strictly
	@$(plain) -m mkdocs build --strict

docs-serve: ## show the documentation at http://127.0.0.1:8080, and follow edits
	@$(plain) -m mkdocs serve --strict --dev-addr 127.0.0.1:8080

lint: ## check style and types
	@$(python) -m ruff check && .venv/bin/ruff format --check && .venv/bin/mypy
	@if command -v shellcheck >/dev/null; then shellcheck --external-sources --source-path=. pierhead .ci/run compose/machine/*.sh; fi

fmt: ## format, and fix what can be fixed
	@$(python) -m ruff format && .venv/bin/ruff check --fix
