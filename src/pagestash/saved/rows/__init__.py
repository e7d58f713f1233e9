"""Which rows of a saved buffer are valid: marks, how operations hand them on, and the check of gradients."""
