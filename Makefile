# make setup    create .venv, install the pinned packages, fetch the default checkpoint
# make lessons  run every lesson from top to bottom, in place, and rewrite figures/ (LESSONS=FILES)
# make check    lint and the fast tests, in about a minute: for every edit
# make test     everything: lint, all tests, every lesson through nbval (figures go to build/ then)
# make lab      JupyterLab on the lessons
# make bench    run the benchmarks and rewrite the tables of README.md and figures/RESULTS.md
# make gpu      the first eight minutes on a GPU: every kernel against its bound, results as JSON
# make student  the learners' version of the lessons, with holes, in build/student/
# make course   a folder for nbgrader: an assignment a lesson, in build/course/ (COURSE=FOLDER)
# make handout  all that a learner needs, without solutions, in build/handout/ (HANDOUT=FOLDER)
# make site     the course as a web site, in build/site/html/; make site-serve shows it

PYTHON ?= python3
BIN := .venv/bin
LESSONS := $(sort $(wildcard notebooks/*.ipynb))
FURTHER := $(sort $(wildcard notebooks/further/*.ipynb))
MINUTES ?= 8
COURSE ?= build/course
HANDOUT ?= build/handout
SITE := build/site
PORT ?= 8000
# Tests run side by side, one thread each: more threads than cores slow each other down many times.
WORKERS ?= 2
# nbval, which only the lessons' tests use, takes seconds to load.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -p no:nbval
# What is compiled and rewritten for one run of the tests serves the next.
unexport PYTHONDONTWRITEBYTECODE
# Let the kernel be the one of .venv, whatever else is installed for the user.
export JUPYTER_PREFER_ENV_PATH := 1
# What the lessons' own exercises keep: a reader's folder notebooks/mine/ is left as it is.
lessons test: export MINILLM_MINE ?= $(CURDIR)/build/mine
# Compiled kernels are kept beside the project, so that a second run need not compile them again.
export TRITON_CACHE_DIR := $(CURDIR)/build/triton

# Threads that wait spin for less long: alone that costs nothing measurable, and beside a busy
# neighbour a step takes a fraction of the time.
lab lessons: export GOMP_SPINCOUNT ?= 10000

.PHONY: setup lessons check test lint lab bench gpu student course handout site site-serve site-test

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minillm needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lessons,tests,serve,peers]'
	$(BIN)/python -m minillm fetch
	touch $@

lessons: setup
	$(BIN)/python -m nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.extra_arguments=--log-level=ERROR $(LESSONS)
	@# Text that was printed piece by piece becomes one output.
	@$(BIN)/python -m nbconvert --log-level ERROR --to notebook --inplace --CoalesceStreamsPreprocessor.enabled=True $(LESSONS)

lint: setup
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

check: lint
	$(PYTEST) -m "not slow and not interpret and not compile and not gpu"

test: lint
	$(PYTEST) -m "not interpret and not compile"
	$(PYTEST) -m compile
	TRITON_INTERPRET=1 $(PYTEST) -m interpret
	PYTHONPATH=tests $(PYTEST) -p without_triton -m "not slow and not gpu" tests
	MINILLM_QUICK=1 MINILLM_FIGURES=build/figures $(PYTEST) --dist loadfile -p nbval --nbval-lax $(LESSONS) $(FURTHER)
	@fresh=$$(mktemp -d) && { $(MAKE) course COURSE="$$fresh"; code=$$?; rm -rf "$$fresh"; exit $$code; }
	@$(MAKE) site-test

lab: setup
	$(BIN)/python -m jupyterlab notebooks

bench: setup
	$(BIN)/python -m minillm.bench
	$(BIN)/python -m minillm.bench --readme

# Needs no network and no .venv: without one, $(PYTHON) is used as it is.
gpu:
	@python="$(BIN)/python"; [ -e .venv/ready ] || python="$(PYTHON)"; \
	"$$python" -c 'import sys; from importlib.util import find_spec; \
	  sys.exit(not (find_spec("torch") and find_spec("triton")))' || { \
	  echo "$$python has no torch or no triton; run make setup first, or give another one:" \
	    "make gpu PYTHON=..."; exit 1; }; \
	"$$python" -m minillm.bench gpu --minutes $(MINUTES)

# One assignment a lesson. Nothing is deleted or changed that is there already: releases, a
# gradebook, submissions, feedback, lessons that a learner has begun.
course: setup
	mkdir -p "$(COURSE)/exchange"
	[ -e "$(COURSE)/nbgrader_config.py" ] || cp notebooks/nbgrader_config.py "$(COURSE)/"
	@new=; for lesson in $(LESSONS); do \
	  name=$$(basename $$lesson .ipynb); own="$(COURSE)/source/$$name/$$name.ipynb"; \
	  if [ ! -e "$(COURSE)/release/$$name" ]; then \
	    mkdir -p "$(COURSE)/source/$$name" && { [ -e "$$own" ] || cp $$lesson "$$own"; } || exit 1; \
	    new="$$new $$name"; \
	  elif ! cmp -s $$lesson "$$own"; then \
	    echo "$$name: the course keeps its own version, which is not that of notebooks/."; \
	  fi; \
	done; \
	[ -z "$$new" ] || (cd "$(COURSE)" && PATH="$(CURDIR)/$(BIN):$$PATH" \
	  python "$(CURDIR)/notebooks/release.py" $$new)
	@echo "The course is in $(COURSE)/; notebooks/README.md says how to go on."

student: course
	mkdir -p build/student build/figures
	cp figures/*.gif build/figures/
	@for lesson in "$(COURSE)"/release/*/*.ipynb; do \
	  [ -e "build/student/$${lesson##*/}" ] || cp "$$lesson" build/student/ || exit 1; \
	done
	@echo "The learners' lessons are in build/student/; files that were there before are kept."

handout: course
	@[ ! -e "$(HANDOUT)" ] || { echo "$(HANDOUT) is there already; move it away, or name another folder: make handout HANDOUT=FOLDER"; exit 1; }
	mkdir -p build
	tar --exclude=__pycache__ -cf build/handout.tar minillm figures/data figures/RESULTS.md figures/*.gif \
	  notebooks/further pyproject.toml constraints.txt environment.yml Makefile README.md LICENSE
	mkdir -p "$(HANDOUT)/notebooks"
	tar -xf build/handout.tar -C "$(HANDOUT)"
	cp "$(COURSE)"/release/*/*.ipynb "$(HANDOUT)/notebooks/"
	@echo "$(HANDOUT)/ is what learners get; make lab opens the lessons there."

# The web site's own environment, without torch; Node comes in it as a package.
$(SITE)/ready: site/requirements.txt site/package-lock.json
	$(PYTHON) -m venv $(SITE)/env
	$(SITE)/env/bin/python -m pip install --quiet --disable-pip-version-check -r site/requirements.txt
	mkdir -p $(SITE)/node && cp site/package.json site/package-lock.json $(SITE)/node/
	cd $(SITE)/node && PATH="$(CURDIR)/$(SITE)/env/bin:$$PATH" npm ci --no-audit --no-fund --loglevel error
	touch $@

IN_SITE = cd site && PATH="$(CURDIR)/$(SITE)/env/bin:$$PATH" PYTHONPATH="$(CURDIR)"

site: $(SITE)/ready
	$(IN_SITE) python -m builder.stage
	@echo "The site is in $(SITE)/html/; make site-serve shows it."

site-serve: site
	$(SITE)/env/bin/python -m http.server --bind 127.0.0.1 --directory $(SITE)/html $(PORT)

# Where there is a Chromium the site is built and tried in it. SITE_NEEDS_BROWSER=1 insists on one.
site-test:
	@if browser=$$(command -v chromium || command -v chromium-browser || command -v google-chrome); \
	then $(MAKE) site && $(IN_SITE) CHROMIUM="$$browser" python -m pytest -p no:cacheprovider tests; \
	else echo "No Chromium is here, so the web site is not tested."; [ -z "$$SITE_NEEDS_BROWSER" ]; fi
