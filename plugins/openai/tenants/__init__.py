"""Who may use the API, how much, and what they have used. Knows nothing of HTTP or the engine.

store      the file of keys (`server.keys_file`): SQLite, in WAL mode       keys      what is in it: keys, tenants
keyring    the keys as the gateway holds them, never older than a moment    limits    per minute: token buckets
turns      how many answers at a time, who waits for one                    account   one key, as a request sees it
ledger     what keys have used, into the same file, in batches              command    `octavo keys`
    usage      `octavo usage`
"""
