#!/usr/bin/env bash
# From a fresh checkout to three trained models, a table, their loss curves and a sample. Run again, it finishes at once.
set -euo pipefail
source "$(dirname "$0")/setup.sh" requirements.txt requirements-report.txt
python -m data.prepare stdlib
python -m scripts.sweep config/quickstart.toml
echo
python -m scripts.report runs/quickstart-{dense,softmax,kern}
echo
echo "--- a sample of runs/quickstart-kern ---"
python -m scripts.sample runs/quickstart-kern --prompt $'class Stack:\n    def ' --tokens 500
