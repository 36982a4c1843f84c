"""`python -m telescope.trainer`."""

from telescope.trainer.main import leave, main

if __name__ == "__main__":
    leave(main())
