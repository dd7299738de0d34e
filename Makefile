# Everything runs from .venv, which is made on demand from nothing but Python 3.11 or newer, pip and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo align-demo test proofs lint install docs clean

demo: .venv/train.done
	$(BIN)/tutti train runs/demo.toml

align-demo: .venv/train.done
	$(BIN)/python benchmarks/align_demo.py

test: .venv/dev.done
	$(BIN)/pytest -n 2 --dist worksteal

proofs: .venv/dev.done
	$(BIN)/pytest --whole tests/proofs
	$(BIN)/pytest -m slow --ignore tests/proofs

lint: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The wheel in a clean environment, and with each extra alone.
install: .venv/dev.done
	$(BIN)/python tools/check_install.py

docs: .venv/docs.done
	$(BIN)/mkdocs build --strict

.venv/%.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off -e '.[$*]'
	@touch $@

clean:
	rm -rf .venv out
