"""`python -m pipeline`: the command line, where the script `draftsmith` is not on the path."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
