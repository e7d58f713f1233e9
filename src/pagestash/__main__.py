"""`python -m pagestash`."""

from pagestash.cli import app

app(prog_name="pagestash")
