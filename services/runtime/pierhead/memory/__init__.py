"""Large tensors in memory that two processes of one machine map: docs/decisions/memory.md.

pool.py     the regions that this process has made, and when each is free (pure)
regions.py  memfds: make, seal, check, map; content in them, until nothing reads it any more
walk.py     the tensors in a message
scope.py    the request that content belongs to
link.py     the Unix socket to one other process
lending.py  a client's connection that one process lends to another, over the same socket
link_setup.py  how two processes find each other
sharing.py  what a call does with its messages, at both ends
process.py  the shared memory of this process: all of it together
"""
