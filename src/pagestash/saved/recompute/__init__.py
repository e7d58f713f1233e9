"""Recompute: a region keeps its inputs, discards what it saved, and runs its forward once more in backward.

From the bottom up, none imports one below it in this list:

    trees, once                    arguments and results; what runs in the first forward only
    chain                          which outputs are held as the input of another recomputed region
    value_checks                   whether recomputed values are those of the first forward
    references, weights, buffers, rng, modes, objects
                                   all that a forward reads: put back for a replay, or refused if it was changed
    recipe                         what it takes to repeat one forward: all of the above
    replay                         repeats it, and takes the tensors that its operations save
    recomputed                     asks for a replay when backward needs a tensor; what waits until then
    packed                         what autograd holds in place of a discarded tensor
    home                           the `recompute` home of one keeper
    recorded_forward               the first forward, which writes the recipe
"""
