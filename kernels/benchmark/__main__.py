"""Command line of the benchmark."""

from .run import main

main()
