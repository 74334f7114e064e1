#!/usr/bin/env bash
# Judge the records of a branch, as CI does for a pull request: check them, train the judged settings again with seeds
# that nobody could try before, and time their steps. About 50 minutes on two cores an entry.
#
#   bash track/judge.sh COMMIT [TARGET]    COMMIT: of the branch; TARGET: what it goes to, by default HEAD
#
# A fresh checkout of TARGET trains and judges. Of the branch, merged into it, it takes router.py and the records alone,
# so nothing else that the branch changes is run. Read its router.py before: it is.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${1:?usage: bash track/judge.sh COMMIT [TARGET]}"
head=$(git rev-parse --verify "$1^{commit}") || { echo "error: fetch it: git fetch origin pull/NUMBER/head" >&2; exit 2; }
target=$(git rev-parse --verify "${2:-HEAD}^{commit}")
merged=$(git merge-tree --write-tree "$target" "$head") || {
    echo "error: the branch conflicts with ${2:-HEAD} (or git is older than 2.38): merge that into it" >&2
    exit 2
}
source scripts/setup.sh requirements.txt requirements-report.txt
root=$PWD
folder=$(mktemp -d)
trap 'git -C "$root" worktree remove --force "$folder/target" || true; rm -rf "$folder"' EXIT
git worktree add --quiet --detach "$folder/target" "$target"
cd "$folder/target"
git checkout --quiet "$merged" -- router.py track/records
python -m scripts.track judge "$head" --salt "${GITHUB_RUN_ID:-$(date +%s%N)}" --parallel "$(nproc)"
