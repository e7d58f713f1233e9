"""What the rest of a decoder layer needs: norms and the rotary embedding."""
