#!/usr/bin/env bash
# Installs this bundle into a new virtual environment, from the files beside it and nothing else: bash install.sh [VENV]
# PYTHON=/path/to/python chooses the interpreter; it must be Python @PYTHON@.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-telescope-venv}
python=${PYTHON:-python@PYTHON@}

# Neither the host's pip.conf nor its PIP_… variables (containers bring constraints) are meant for these wheels.
pip() { PIP_CONFIG_FILE=/dev/null "$venv/bin/python" -m pip --isolated --disable-pip-version-check install --quiet --no-index "$@"; }
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
    # Where that Python is itself a virtual environment's, "system" means the Python below it: what it has is added.
    "$python" - "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" << 'END'
import pathlib, sys, sysconfig
if sys.prefix != sys.base_prefix:
    theirs = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in theirs)
    pathlib.Path(sys.argv[1], "of_the_host.pth").write_text(lines)
END
    pip --no-deps "$scratch"/wheels/*.whl
else
    "$python" -m venv "$venv"
    pip --find-links "$scratch/wheels" @REQUIREMENTS@
fi
"$venv/bin/python" -m telescope.run --help > /dev/null
[ -z "$no_deps" ] || "$venv/bin/python" -m telescope.cli.bundle_check "$here/bundle.json" || fail "Install what is missing beside $python, then again."
printf 'Installed. Try: %s/bin/telescope run\n' "$venv"
