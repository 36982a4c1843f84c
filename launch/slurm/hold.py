"""The first of a job's interpreters: keeps the warning before the walltime waiting until there is somebody to hear it.

`python -I -S hold.py -u -m module …` blocks USR2 and becomes `python -u -m module …`. A blocked signal is kept through `exec`
and through all that the next interpreter imports, until `batch.run` lets it in; unblocked it would kill that interpreter, or
reach submitit, which gives up the job. A script of its own with the standard library alone: while it starts, the shell has the
signal ignored, so it must start at once.
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
