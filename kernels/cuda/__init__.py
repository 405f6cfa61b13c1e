"""CUDA kernels: sources, their plain-torch references, and what compiles and launches them. See README.md here.

Importing anything below needs neither a GPU nor CuPy: those are loaded when a device library is made.
"""
