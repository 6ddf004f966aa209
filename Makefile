# Everything a newcomer needs: `make demo` and `make test` set the machine up by themselves.
.PHONY: setup demo test test-more check format wheel bench bench-page torch-page rpc-page soak sanitize sanitize-build fuzz clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := $(VENV)/build
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt pyproject.toml $(wildcard native/*.txt native/*/*)

# Every rank imports the library: compiled once, not in each of thousands of processes.
unexport PYTHONDONTWRITEBYTECODE

setup: $(STAMP)

# torch is pinned: any other spelling brings gigabytes of CUDA libraries.
$(VENV)/.tools:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet "scikit-build-core>=0.11" "nanobind>=2.4" ninja
	$(BIN)/pip install --quiet torch==2.13.0
	touch $@

# The editable install knows every module by name: it is made anew when one comes or goes.
$(VENV)/.modules: $(VENV)/.tools FORCE
	@find src -name '*.py' | sort | cmp --silent - $@ || find src -name '*.py' | sort > $@

$(STAMP): $(VENV)/.tools $(VENV)/.modules $(NATIVE)
	$(BIN)/pip install --quiet --no-build-isolation --config-settings=build-dir=$(BUILD)/module \
		-e ".[test,bf16,plot,mpi,iroh]"
	touch $@

demo: $(STAMP)
	$(BIN)/unisono run -n 4 examples/train.py

# What a newcomer runs: everything once, over shared memory. `make test-more` adds the other links, other libraries and
# what takes long; CI runs both. Three files at a time on two cores: many tests wait, for time to pass or for processes.
PYTEST = $(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder --quiet
test: $(STAMP)
	$(PYTEST) -m "not more"

test-more: $(STAMP)
	$(PYTEST) -m more

CPP = $(shell git ls-files 'native/*.?pp' 'tests/native/*.?pp' 'tests/fuzz/*.?pp')
check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/cppcheck --std=c++20 --language=c++ --enable=warning,performance,portability --inline-suppr --quiet -I native \
		--suppress=missingIncludeSystem --suppress=uninitMemberVarNoCtor --error-exitcode=1 native tests/native tests/fuzz

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

# Wheels in dist/ for every interpreter found, each tried in a fresh environment.
wheel: $(VENV)/.tools
	$(BIN)/python tools/wheels.py

# The figures: every verb and way of calling beside MPI and Gloo, a halo exchange, the links, what memory allows, ranks
# in one process, observers of works, ways of calling that are much slower than the plain call, calls beside torch.rpc, gRPC and ZeroMQ, torch.distributed and DDP beside Gloo,
# import, start-up and memory.
bench: $(STAMP)
	$(BIN)/pip install --quiet grpcio pyzmq msgpack
	$(BIN)/unisono bench --quick
	$(BIN)/python bench/halo.py
	$(BIN)/python bench/links.py
	$(BIN)/python bench/limit.py
	$(BIN)/python bench/local_ranks.py
	$(BIN)/python bench/observers.py
	$(BIN)/python bench/cliffs.py
	$(BIN)/python bench/rpc.py
	$(BIN)/python bench/torch_collectives.py --quick
	$(BIN)/python bench/torch_ddp.py --quick
	$(BIN)/python bench/import_time.py
	$(BIN)/python bench/startup.py

# docs/benchmarks.md and its chart, from one long run on a machine where nothing else runs.
bench-page: $(STAMP)
	$(BIN)/unisono bench --json $(VENV)/bench.json --plot docs/benchmarks.png
	$(BIN)/python bench/page.py $(VENV)/bench.json > $(VENV)/benchmarks.md
	mv $(VENV)/benchmarks.md docs/benchmarks.md

# docs/torch_benchmarks.md and its charts, likewise.
torch-page: $(STAMP)
	$(BIN)/python bench/torch_collectives.py --keep $(VENV)/torch.json
	$(BIN)/python bench/torch_ddp.py --keep $(VENV)/torch.json
	$(BIN)/python bench/torch_page.py $(VENV)/torch.json docs

# The tables of docs/rpc.md, likewise.
RPC := $(BIN)/python bench/rpc.py --json $(VENV)/rpc.json
rpc-page: $(STAMP)
	rm -f $(VENV)/rpc.json
	$(RPC) --parts kinds --rows page --only shm,tcp,tls,torch,torch-tcp --seconds 0.1
	$(RPC) --parts sendrecv,alike,steps,busy,wakes --only shm,tcp,tls --seconds 0.15
	$(RPC) --parts load --only shm,tcp,tls,torch,torch-tcp
	$(BIN)/python bench/rpc.py --tables $(VENV)/rpc.json --into docs/rpc.md

# A thousand ranks killed at random, every value checked, nothing left behind. Then what ranks must do and bear, on
# every kind of links: the acceptance tests, the cases and properties of every backend, a thousand flipped bits, the
# GIL held for a minute.
LONG := $(wildcard tests/conformance/test_acceptance_*.py) tests/conformance/test_native_cases.py \
	$(addprefix tests/process/test_native_, threats.py processes.py failures.py)
soak: $(STAMP)
	$(BIN)/python -m tests.soak.kills 1000
	$(BIN)/python -m pytest --long $(LONG)
	$(BIN)/python -m tests.soak.calls 100000

# Builds of their own beside the user's: rings and wake-ups on threads under TSan; the process tests with a module
# under ASan and UBSan, and those with many threads with one under TSan, each in an environment that finds this module
# instead of the installed one.
ASAN := $(BUILD)/sanitize-address
TSAN := $(BUILD)/sanitize-thread
CMAKE = cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	-DCMAKE_BUILD_TYPE=RelWithDebInfo
# Python is not built with the sanitizer, so the sanitizer comes first; and the interpreter's own memory is no leak.
ASAN_ENV = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=4 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
TSAN_ENV = LD_PRELOAD="$$(gcc -print-file-name=libtsan.so) $$(g++ -print-file-name=libstdc++.so)" \
	TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:suppressions=$(abspath tests/support/tsan.supp)
SANITIZED ?= $(addprefix tests/conformance/test_native_, plans.py programs.py conformance.py cases.py) \
	$(addprefix tests/process/test_, native_processes.py native_failures.py native_threats.py quic_strangers.py \
	quic_members.py quic_networks.py quic_endings.py fast_path.py fast_failures.py run_ahead.py fast_messages.py \
	fast_payloads.py rpc_failure.py rpc_load.py works.py work_callbacks.py work_races.py call_storm.py announced.py \
	object_blobs.py decisions.py) \
	tests/native/test_corpus.py $(wildcard tests/unit/rpc/test_*.py) $(addprefix tests/unit/core/test_codec, .py _classes.py _refusals.py)
THREADED ?= $(addprefix tests/process/test_, works.py work_callbacks.py work_races.py call_storm.py announced.py rpc_load.py)

sanitize: sanitize-build
	$(TSAN)/native/engine_test
	$(ASAN)/native/engine_test
	$(ASAN)/native/quic_test
	$(ASAN_ENV) $(ASAN)/venv/bin/python -m pytest --timeout=600 $(SANITIZED)
	$(TSAN_ENV) $(TSAN)/venv/bin/python -m pytest --timeout=600 $(THREADED)

sanitize-build: $(STAMP)
	$(CMAKE) -B $(TSAN) -DUNISONO_SANITIZE=thread
	cmake --build $(TSAN) --target _native engine_test
	$(CMAKE) -B $(ASAN) -DUNISONO_SANITIZE=address,undefined
	cmake --build $(ASAN) --target _native engine_test quic_test quic_member decoders
	for build in $(TSAN) $(ASAN); do \
		rm -rf $$build/site && mkdir -p $$build/site && cp -rs $(abspath src/unisono) $$build/site/ && \
		cp $$build/native/_native.*.so $$build/site/unisono/ && \
		$(BIN)/python -m venv --without-pip --clear $$build/venv && \
		$(BIN)/python -c "import site, sys; print(sys.argv[1], *site.getsitepackages(), *sys.path[1:], sep='\n')" \
			$(abspath .)/$$build/site > $$(echo $$build/venv/lib/python3*/site-packages)/sanitized.pth || exit 1; done

# Every decoder of bytes from others, a million inputs each: the engine's and the codec's under ASan and UBSan. A freed
# block is kept from use for 4 MiB of others, so that growth is the decoder's own.
FUZZ_INPUTS ?= 1000000
FUZZ_SEED ?= 1
fuzz: sanitize-build
	for decoder in tcp quic datagram ring connector; do \
		ASAN_OPTIONS=quarantine_size_mb=4 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(ASAN)/native/decoders $$decoder $(FUZZ_INPUTS) $(FUZZ_SEED) tests/corpus/$$(echo $$decoder | sed s/quic/tcp/) || exit 1; done
	$(ASAN_ENV) $(ASAN)/venv/bin/python -m tests.fuzz.decoders $(FUZZ_INPUTS) $(FUZZ_SEED)

FORCE:

clean:
	rm -rf $(VENV)
