"""What a layer is on one rank: its parts, what they save, hold, compute and send."""
