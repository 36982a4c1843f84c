"""`python -m telescope.inference --run-dir DIR --name server-0`"""

from telescope.inference.main import leave, main

if __name__ == "__main__":
    leave(main())
