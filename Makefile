# make setup    create .venv, install the pinned packages, fetch the default checkpoint
# make lessons  run every lesson from top to bottom, in place, and rewrite figures/
# make test     lint, tests, and every lesson through nbval (figures go to build/ then)
# make lab      JupyterLab on the lessons
# make bench    run the benchmarks and rewrite the README's tables
# make student  the learners' version of the lessons, with holes, in build/student/

PYTHON ?= python3
BIN := .venv/bin
LESSONS := $(sort $(wildcard notebooks/*.ipynb))
# Let the kernel be the one of .venv, whatever else is installed for the user.
export JUPYTER_PREFER_ENV_PATH := 1

.PHONY: setup lessons test lab bench student

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minillm needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lessons,tests,peers]'
	$(BIN)/python -m minillm fetch
	touch $@

lessons: setup
	@for lesson in $(LESSONS); do \
	  echo "$$lesson"; \
	  $(BIN)/python -m nbconvert --log-level ERROR --to notebook --execute --inplace \
	    --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.extra_arguments=--log-level=ERROR $$lesson || exit 1; \
	done
	@# Text that was printed piece by piece becomes one output.
	@$(BIN)/python -m nbconvert --log-level ERROR --to notebook --inplace --CoalesceStreamsPreprocessor.enabled=True $(LESSONS)

test: setup
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m pytest -m "not interpret and not compile"
	$(BIN)/python -m pytest -m compile
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m interpret
	MINILLM_FIGURES=build/figures $(BIN)/python -m pytest --nbval-lax $(LESSONS)

lab: setup
	$(BIN)/python -m jupyterlab notebooks

bench: setup
	$(BIN)/python -m minillm.bench
	$(BIN)/python -m minillm.bench --readme

student: setup
	rm -rf build/nbgrader build/student
	mkdir -p build/nbgrader/source/minillm
	cp $(LESSONS) build/nbgrader/source/minillm/
	cd build/nbgrader && PATH="$(CURDIR)/$(BIN):$$PATH" python -m nbgrader generate_assignment minillm --create --force --course-dir=.
	cp -r build/nbgrader/release/minillm build/student
	@echo "The learners' lessons are in build/student/."
