#!/usr/bin/env bash
# Judge the records of a branch, as CI does for a pull request: check them, and train the judged settings again, with
# seeds that nobody could try before. Two hours on two cores an entry.
#
#   bash track/judge.sh COMMIT [BASE]      from the checkout that judges; BASE is by default its own commit
#
# A fresh checkout of BASE trains and judges. From the branch it takes router.py and the records alone, so nothing else
# that the branch changes is run. Read its router.py before: it is.
set -euo pipefail
head=$(git rev-parse --verify "$1^{commit}")
base=$(git rev-parse --verify "${2:-HEAD}^{commit}")
source "$(dirname "$0")/../scripts/setup.sh" requirements.txt requirements-report.txt
root=$PWD
folder=$(mktemp -d)
trap 'git -C "$root" worktree remove --force "$folder/base"; rm -r "$folder"' EXIT
git worktree add --quiet --detach "$folder/base" "$base"
cd "$folder/base"
git checkout --quiet "$head" -- router.py track/records
python -m scripts.track judge "$head" --salt "${GITHUB_RUN_ID:-}" --parallel "$(nproc)"
