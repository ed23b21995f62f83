# Python 3.10 or newer and make are all that has to be there.
PYTHON ?= python3
PY := .venv/bin/python
REPO_ID := kernels-test/gemm-triton-autotune
# A staged build is loaded, never the Hub's, and nobody's own tuned files decide what is shown.
LOCAL := LOCAL_KERNELS=$(REPO_ID)=$(CURDIR) HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

.PHONY: demo test quality style build bench matrix versions clean

demo: build
	$(LOCAL) $(PY) -u tools/demo.py

test: build
	$(LOCAL) $(PY) -m pytest -n 2

quality: build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(LOCAL) $(PY) tune.py --check

style: .venv/made
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

build: .venv/made
	$(PY) tools/stage_build.py

bench: build
	$(LOCAL) .venv/bin/kernels benchmark .

matrix: build
	$(LOCAL) $(PY) tools/compile_matrix.py --write benchmarks/MATRIX.md

versions: build
	$(PY) tools/version_matrix.py --write benchmarks/VERSIONS.md

.venv/made: requirements-dev.txt tools/make_environment.py
	$(PYTHON) tools/make_environment.py
	touch $@

clean:
	rm -rf build .venv .versions
