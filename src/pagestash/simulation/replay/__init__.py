"""A step, event by event."""
