#!/usr/bin/env bash
# From a fresh checkout to three trained models, a table, their loss curves and a sample. Run again, it finishes at once.
set -euo pipefail
echo "1 of 4: install, 1.6 GB on disk with torch for CPUs, 5.1 GB with CUDA"
source "$(dirname "$0")/setup.sh" requirements.txt requirements/report.txt
echo "2 of 4: prepare the source text of Python's standard library"
python -m data.prepare stdlib
echo "3 of 4: train three small models, about 3 minutes on two free CPU cores"
python -m scripts.sweep config/quickstart.toml
# The sweep names the folders of its runs: runs/quickstart-kern may hold a trial with other settings.
folders=$(python -m scripts.sweep config/quickstart.toml --dry-run | sed -n 's/.*finished already: //p')
kern=$(tail -n 1 <<< "$folders")
echo
echo "4 of 4: sample and report"
echo "--- a sample of $kern ---"
python -m scripts.sample "$kern" --prompt $'class Stack:\n    def ' --tokens 500
echo
python -m scripts.report $folders --out runs/report-quickstart
echo
echo "The curves are in runs/report-quickstart/report.html. One run each, untuned, from unequal gate norms:"
echo "README.md, \"Compare routers\", says what equal tuning leaves of the differences."
echo "The commands above work after: source .venv/bin/activate"
