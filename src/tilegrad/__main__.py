"""`python -m tilegrad` is the command `tilegrad`."""

from tilegrad_command import main

if __name__ == "__main__":
    main()
