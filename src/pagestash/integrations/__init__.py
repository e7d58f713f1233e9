"""Adapters to other libraries; each is imported by name and needs its library installed."""
