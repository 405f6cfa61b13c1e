"""Numbers of a running service: `/metrics` for Prometheus, and `octavo top` for people.

    families   what a metric is, and how it is written in Prometheus's text format
    meter      counts what the gateway's clients ask and get
    service    the page: the meter's numbers, and what the actors say of themselves
    top        the same picture, live in a terminal

The same names are always there, zeros included; counters only grow while their process lives.
"""
