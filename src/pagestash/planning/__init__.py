"""Plan a policy from a profile: predict what a step would take under it."""
