"""The implementation of each command of `pagestash`; `cli.py` has their options."""
