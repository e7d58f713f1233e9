"""`ps.verify`: whether a policy changes any bit of a training step."""
