"""`python -m coppice_cli` is the `coppice` command."""

from coppice_cli import main

if __name__ == "__main__":
    main()
