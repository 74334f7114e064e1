#!/usr/bin/env bash
# Lint and tests, from a fresh checkout. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh" requirements-dev.txt
ruff check .
ruff format --check .
python -m pytest "$@"
