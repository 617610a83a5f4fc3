"""``python -m trainwright`` is the command line."""

from trainwright.cli import main

main()
