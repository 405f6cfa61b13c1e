"""`octavo batch`: a file of requests in OpenAI's batch format, answered into another file.

requests      the file: which lines are requests, and which of them are answered already
asgi          one call of the gateway's own application, without a socket
command       runs them, some at a time
"""
