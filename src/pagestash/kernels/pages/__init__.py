"""Kernels of the page pool: reserve, copy and release pages, and address rows in them."""
