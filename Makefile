# Everything a newcomer needs: `make demo` and `make test` set the machine up by themselves.
.PHONY: setup demo test check format bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt pyproject.toml $(wildcard native/*)

setup: $(STAMP)

# torch is pinned: any other spelling brings gigabytes of CUDA libraries.
$(VENV)/.tools:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet "scikit-build-core>=0.11" "nanobind>=2.4" ninja
	$(BIN)/pip install --quiet torch==2.13.0
	touch $@

$(STAMP): $(VENV)/.tools $(NATIVE)
	$(BIN)/pip install --quiet --no-build-isolation -e ".[test,bf16,plot,mpi,quic]"
	touch $@

demo: $(STAMP)
	$(BIN)/unisono run -n 4 examples/train.py

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	for script in bench/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
