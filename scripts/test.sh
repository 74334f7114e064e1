#!/usr/bin/env bash
# Linter, formatter, type checker, then the tests, two files at a time. Works in a fresh checkout.
# Arguments go to pytest: -m integration or -m slow runs the tests that are left out by default, -n 0 one at a time.
set -euo pipefail
source "$(dirname "$0")/setup.sh" requirements/dev.txt
ruff check .
ruff format --check .
pyrefly check
python -m pytest -n 2 --dist loadfile --durations=20 "$@"
