"""The executor `transformers`: any decoder of the transformers library that lets others do its attention, in fp32.

    decoder    the library's model over our paged pool, its linears made independent of company
    executor   loads it, checks it against itself, and runs steps as the CPU executor does

Slower than models that Octavo knows by family, and as exact.
"""
