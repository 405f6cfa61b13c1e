"""A run as OpenTelemetry spans, made of its trace after the fact.

names     what our facts are called in OpenTelemetry's conventions: the one place that follows them
spans     a request's life as spans; pure
command   `octavo trace otlp`: sends them over OTLP/HTTP, in JSON, so that nothing need be installed for it
"""
