"""`python -m lmhead` is `lmhead`."""

from lmhead.cli import main

main()
