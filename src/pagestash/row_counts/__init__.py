"""How many rows arrive at experts: stated, drawn, or counted in a run. Imports no torch."""
