#!/usr/bin/env bash
# Judge the records that this branch adds since BASE (by default origin/main), as CI does for a pull request: check all
# records, then train the judged settings again with seeds that follow from the commit. Two hours on two cores an entry.
set -euo pipefail
source "$(dirname "$0")/../scripts/setup.sh"
python -m scripts.track judge --base "${1:-origin/main}" --parallel "${2:-$(nproc)}"
