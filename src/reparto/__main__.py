"""`python -m reparto` is the command `reparto`."""

from reparto.cli.main import main

main()
