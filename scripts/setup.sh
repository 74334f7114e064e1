# Sourced by quickstart.sh and test.sh: makes .venv in the checkout, installs the requirements files named as arguments
# (by default requirements.txt; again only when they change), and activates it. PYTHON names another interpreter than
# python3.
# requirements.txt and requirements/report.txt, 1.6 GB with torch for CPUs, took pip 3:50 minutes on two cores at a load
# of 10 (2026-11-26; torch and others from local files). uv 0.13.9 took 1:25 for 5.1 GB, with PyPI's torch for CUDA
# (2026-11-27, two busy cores).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) is too old, nanoKERN needs Python 3.11 or later; name one: PYTHON=python3.12 bash $0" >&2
    exit 2
}
[ -x .venv/bin/pip ] || "$python" -m venv .venv || {
    echo "error: .venv could not be made; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 2
}
source .venv/bin/activate

# On a terminal one line shows how much is on disk, until it is killed or this script ends.
show_progress() {
    while [ -t 1 ] && sleep 1 && kill -0 $$ 2> /dev/null; do
        printf '\r%s on disk ' "$(du -sh .venv | cut -f1)"
    done
}

install() {
    local status=0
    echo "installing $1 into .venv ..."
    show_progress &
    { command -v uv > /dev/null && uv pip install -q -r "$1"; } ||
        pip install -q --disable-pip-version-check -r "$1" || status=$?
    kill $! 2> /dev/null || true
    if [ -t 1 ]; then echo; fi
    return "$status"
}

for file in "${@:-requirements.txt}"; do
    name="${file//\//-}"  # requirements/dev.txt: requirements-dev.txt
    stamp=".venv/$(cat requirements.txt requirements/*.txt | cksum | cut -d' ' -f1)-$name"
    if [ -e "$stamp" ]; then
        echo "already installed: $file"
    else
        install "$file"
        rm -f .venv/*-"$name"
        touch "$stamp"
    fi
done
