"""Not here: importing it says why."""

raise ImportError("pierhead.rayserve.gang: there is no gang scheduling: nothing places groups of replicas together")
