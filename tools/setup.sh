#!/bin/sh
# Make a virtual environment, and install what is locked and both packages (editable) into it.
#   tools/setup.sh VENV torch2.13                 what requirements/torch2.13.txt names and, for a CUDA build, its libraries
#   tools/setup.sh VENV newest [REQUIREMENT...]   the newest that the package, requirements/tools.in, integrations.in and these allow
# Needs Python >= 3.10 with venv and headers, and a C++ compiler, which Inductor uses on CPU.  As root on Debian or Ubuntu
# what is missing is installed; elsewhere it is named.
set -eu
venv=$1
name=$2
shift 2
python=${BASE_PYTHON:-python3}

# step TEXT COMMAND...: say what is done, run the command, and say every 10 seconds that it still runs.
step() {
    text=$1
    shift
    echo "$text"
    (
        seconds=0
        while sleep 10 >/dev/null 2>&1 && kill -0 $$; do # until the script ends, however it ends
            seconds=$((seconds + 10))
            echo "  ... $seconds s"
        done
    ) &
    ticker=$!
    status=0
    "$@" || status=$?
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    [ "$status" = 0 ] || { echo "error: this step failed: $text" >&2; exit "$status"; }
}

missing=""
if command -v "$python" >/dev/null; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: $("$python" --version) is too old: Python 3.10 or newer is needed (BASE_PYTHON=... names another)" >&2
        exit 1
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        missing="$missing python3-dev"
else
    missing=" python3 python3-venv python3-dev"
fi
command -v g++ >/dev/null || command -v clang++ >/dev/null || missing="$missing g++"

if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        step "updating the list of packages" apt-get update -qq
        # shellcheck disable=SC2086  # one word per package
        step "installing$missing" \
            env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    else
        echo "error: missing:$missing.  On Debian or Ubuntu: sudo apt-get install$missing" >&2
        exit 1
    fi
fi

[ -x "$venv/bin/python" ] || step "making the virtual environment $venv" "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
locked() { pip install -q --no-deps --require-hashes -r "requirements/$1.txt"; }
step "installing pip" locked pip

if [ "$name" = newest ]; then
    step "installing the newest that is allowed: torch is large, and this can take minutes" \
        pip install -q --upgrade --upgrade-strategy eager -r requirements/tools.in -r requirements/integrations.in -e . -e guard "$@"
else
    # A CPU build has the version of the lock and a label (2.13.0+cpu).  It has no hash there, because it is not in the registry
    # that the lock was made with; and for pip it is the version that the lock asks for.
    torch=$(sed -nE 's/^torch==([0-9.]+).*/\1/p' "requirements/$name.txt")
    if pip index versions torch --json | grep -qF "\"$torch+cpu\""; then
        step "installing the CPU build of torch $torch" pip install -q --no-deps "torch==$torch+cpu"
    else
        step "installing the libraries of CUDA, 3 GB: this can take minutes" locked "$name-cuda"
    fi
    step "installing what requirements/$name.txt names" locked "$name"
fi
step "installing dash_inductor and dash_guard" pip install -qq --no-build-isolation --no-deps -e . -e guard
step "checking that nothing is missing" pip check
