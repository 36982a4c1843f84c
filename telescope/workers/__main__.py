"""`python -m telescope.workers`."""

from telescope.workers.main import leave, main

if __name__ == "__main__":
    leave(main())
