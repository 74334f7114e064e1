#!/usr/bin/env bash
# Lint and tests, from a fresh checkout: two test files at a time. Arguments go to pytest: -n 0 for one process, -m slow
# for the tests that are left out.
set -euo pipefail
source "$(dirname "$0")/setup.sh" requirements-dev.txt
ruff check .
ruff format --check .
python -m pytest -n 2 --dist loadfile "$@"
