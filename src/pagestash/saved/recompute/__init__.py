"""Recompute: a region keeps its inputs, discards what it saved, and runs its forward once more in backward.

From the bottom up, none imports one below it in this list:

    trees, once                    arguments and results; what runs in the first forward only
    chain                          which outputs are held as the input of another recomputed region
    rng, rng_and_buffers, weights, attributes, argument_objects
                                   all that a forward reads, and the refusal if it was changed
    value_checks                   whether recomputed values are those of the first forward
    recipe                         what it takes to repeat one forward: all of the above
    replay                         repeats it, and takes the tensors that its operations save
    recomputed                     asks for a replay when backward needs a tensor; what waits until then
    packed                         what autograd holds in place of a discarded tensor
    home                           the `recompute` home of one keeper
    recorded_forward               the first forward, which writes the recipe
"""
