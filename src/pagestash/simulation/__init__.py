"""Steps on clusters that are not at hand: what each rank holds, and how long the step takes."""
