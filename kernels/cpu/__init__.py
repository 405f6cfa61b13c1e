"""The native step library for CPUs: C++ sources, and the builder that compiles them. Knows no model and no file."""
