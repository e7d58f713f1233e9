"""Devices, links and layouts of ranks."""
