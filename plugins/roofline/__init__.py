"""What bounds each step: arithmetic, memory traffic, the room for a larger batch, or the way to the executor.

    machine   what this machine can do: measured once, kept
    bound     a step's work and bytes, and which of the four bounds it; pure
    draw      the picture
    command   `octavo roofline`

The method: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""
