"""`python -m tilegrad` is the command `tilegrad`."""

from tilegrad.cli.main import main

if __name__ == "__main__":
    main()
