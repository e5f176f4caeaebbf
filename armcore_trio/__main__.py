"""`python -m armcore_trio` is the command `armcore-trio`."""

from armcore_trio.cli import main

if __name__ == "__main__":
    main()
