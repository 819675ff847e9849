# What a newcomer and a developer type; the set-up itself is .ci/setup, a no-op once it has run.
# GNU make 3.81 (the one on macOS) is enough.
BIN := .venv/bin
# Two processes, one thread each: two threads a library on top of that is slower, and less repeatable.
PYTEST := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: help chat test test-all lint clean

help:
	@echo 'make chat      set up what is missing, then chat with the default model'
	@echo 'make test      set up what is missing, then run the tests (minutes)'
	@echo 'make test-all  the tests with the slow ones'
	@echo 'make lint      ruff and mypy'
	@echo 'make clean     remove .venv and every cache in this folder; models stay'

chat:
	@sh .ci/setup
	@$(BIN)/ferrum-mlx chat

test:
	@sh .ci/setup test
	@$(PYTEST) -m 'not slow'

test-all:
	@sh .ci/setup test
	@$(PYTEST)

lint:
	@sh .ci/setup test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	@rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
