"""`python -m unisono`: the same as the `unisono` command."""

from unisono.cli import main

main(prog_name="unisono")
