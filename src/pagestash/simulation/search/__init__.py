"""The fastest layout and homes that fit a cluster."""
