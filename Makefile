# `make demo` runs the main job, `make test` all tests; both set up what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find tenplexrun agent store vfs -name '*.py' 2>/dev/null | sort)
PACKAGES := fuse3 libfuse3-dev pkg-config gcc python3-dev python3-venv iproute2

.PHONY: demo test test-slow coverage lint setup clean peers

demo: setup
	$(BIN)/python examples/demo.py

# Four at once, since tests of processes mostly wait; the long ones first.
TESTS := $(addprefix tests/,faults integration contract sim property unit)
test: lint
	$(BIN)/pytest -n 4 --dist worksteal $(TESTS)

test-slow: setup
	$(BIN)/pytest -n 2 --dist worksteal -m slow $(TESTS)
	HYPOTHESIS_PROFILE=many $(BIN)/pytest -n 2 tests/property

# 100 % of the branches of the planner and the layout language.
PLANNER := balance,layout,local,ops,placement,planner,ptc,ranges,replicas,shared,sources,spec,stages,validation
comma := ,
coverage: export COVERAGE_FILE := build/coverage
coverage: setup
	$(BIN)/coverage run --branch --include='*/core/$(subst $(comma),.py$(comma)*/core/,$(PLANNER)).py' $(BIN)/pytest -q \
	  tests/unit/test_layout.py tests/unit/test_layout_language.py tests/unit/test_planner.py tests/unit/test_explain.py \
	  tests/unit/test_docs_layouts.py tests/unit/test_cases_state.py tests/unit/test_snapshots.py \
	  tests/property/test_balance.py tests/property/test_placement.py \
	  tests/property/test_layout.py tests/property/test_validation.py
	$(BIN)/coverage report -m --fail-under=100

# Other launchers and loaders, for benchmarks/membership.py and data.py.
peers: build/peers/bin/ft_launcher
build/peers/bin/ft_launcher: constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv build/peers
	build/peers/bin/pip install -q torch==2.13.0
	build/peers/bin/pip install -q -c constraints.txt -r benchmarks/peers.txt
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# Not here: the checkout itself would shadow the package.
	cd tests && ../$(BIN)/mypy --config-file ../pyproject.toml -p tenplexrun
	cd tests && ../$(BIN)/lint-imports --no-cache ../pyproject.toml

setup: $(VENV)/installed

# The list of source files is part of the stamp: the link tree of a strict editable install is made anew
# when a file comes or goes.
$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/torch $(VENV)/sources
	$(BIN)/pip install -q --no-build-isolation -c constraints.txt -e '.[fuse,dev]' --config-settings editable_mode=strict \
	 || $(BIN)/pip install -q --no-build-isolation -c constraints.txt -e '.[dev]' --config-settings editable_mode=strict
	touch $@

$(VENV)/sources: FORCE
	@mkdir -p $(VENV); echo '$(SOURCES)' | cmp -s - $@ || echo '$(SOURCES)' > $@

$(VENV)/torch: constraints.txt $(VENV)/bin/python
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q 'setuptools>=77' wheel
	touch $@

$(VENV)/bin/python:
	sh tools/system-packages.sh $(PACKAGES)
	$(PYTHON) -m venv $(VENV)

FORCE:

clean:
	rm -rf $(VENV) build *.egg-info
