"""The implementation of each command of `pagestash`; `cli/` has their options."""
