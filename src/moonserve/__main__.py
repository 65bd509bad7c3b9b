"""`python -m moonserve`: the same program as `moonserve`."""

from moonserve.cli import main

if __name__ == "__main__":
    main()
