"""``python -m surefoot.cli``: the command where no console script is installed."""

from surefoot.cli.main import main

main()
