"""Parsers of what models write: tool calls and reasoning inside an answer's text.

Entry-point groups `octavo.tool_parser` and `octavo.reasoning_parser` (see `contract`). Know nothing of HTTP.
"""
