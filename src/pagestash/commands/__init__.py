"""What stands behind each command of `pagestash`; `cli.py` has their options."""
