"""Expert parallelism: what brings rows to the ranks of their experts, and how much room is made for them."""
