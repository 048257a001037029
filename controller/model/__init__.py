"""The controller's data types: immutable values without I/O, which all its rooms share.

Spec (what the user wrote), desired (spec plus overrides) and observed (one snapshot of the world) are separate types.
Times are seconds of the controller's clock (controller/storage/clock.py), passed in by the loop; durations end in `_s`.

States of a replica, derived from the snapshot and never stored:

    PENDING ----> STARTING ----> RUNNING ----> DRAINING ----> STOPPING ----> (gone)
    no container  container,     ready by      no new calls,  SIGTERM sent,
    yet: reason   not ready yet  its probe     finishing      until it exits
                   ^  |             |               |
                   |  |             |               `--> ASLEEP   in the place of SIGTERM; its GPUs are free
                   `--|-------------|----------------------'      its service is wanted again: it is woken
                      |             |
                      +--> FAILED <-+   exited by itself, startup deadline passed, or probe failed too often
"""
