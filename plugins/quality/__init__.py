"""How near an executor's fast arithmetic comes to fp32: teacher-forced distributions over texts that are shipped.

texts      what is read
measure    two distributions at every position, compared; pure arithmetic
command    `octavo verify quality`
"""
