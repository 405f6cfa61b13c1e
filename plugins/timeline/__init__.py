"""A run as a picture: for Perfetto (or chrome://tracing), and as one page of its own.

    chrome     the run as trace events, with arrows along each step
    page       the run as the data of page.html
    command    `octavo trace export`

Both show what `core/trace` finds in a run; neither knows anything else of Octavo.
"""
