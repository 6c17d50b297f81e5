"""`python -m coppice.cli` is the `coppice` command."""

from coppice.cli import main

if __name__ == "__main__":
    main()
