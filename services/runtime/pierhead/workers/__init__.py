"""Several processes that serve one replica's HTTP port together.

    supervisor.py   the parent: starts workers, keeps them, answers at the admin port
    supervision.py  what it decides, pure
    place.py        what a worker is told
    pages.py        the workers' metrics as one page, pure
    board.py        a few numbers in memory that all of them share
    seat.py         a worker's place in the replica

The parent is the process that called `serve()`, gone on as another program by `exec`: what the service has imported and
loaded is not kept once more. Workers are the service's own program, started again: a process that forks takes along
locks and pools whose threads it does not have, and gRPC, CUDA and OpenMP do not survive that.
"""
