#!/usr/bin/env bash
# Installs this bundle into a new virtual environment, from the files beside it and nothing else: bash install.sh [VENV]
# PYTHON=/path/to/python chooses the interpreter; it must be Python @PYTHON@.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-telescope-venv}
python=${PYTHON:-python@PYTHON@}

fail() { printf '%s\n' "$*" >&2; exit 1; }
command -v "$python" > /dev/null || fail "There is no $python: set PYTHON=/path/to/a/Python-@PYTHON@."
[ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "@PYTHON@" ] || fail "$python is not Python @PYTHON@, for which these wheels are."
(cd "$here" && sha256sum --quiet --check SHA256SUMS) || fail "A part is missing or damaged: copy the bundle again."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat "$here"/wheels.tar.* | tar -x -C "$scratch"
no_deps='@NO_DEPS@'
if [ -n "$no_deps" ]; then
    # Some packages are the host's own: they are seen from inside, and everything here is installed as it is.
    "$python" -m venv --system-site-packages "$venv"
    "$venv/bin/python" -m pip install --quiet --no-index --no-deps "$scratch"/wheels/*.whl
else
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --no-index --find-links "$scratch/wheels" @REQUIREMENTS@
fi
"$venv/bin/python" -m telescope.run --help > /dev/null
printf 'Installed. Try: %s/bin/telescope run\n' "$venv"
