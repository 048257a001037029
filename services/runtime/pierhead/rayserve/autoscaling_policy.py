"""Not here: importing it says why."""

raise ImportError(
    "pierhead.rayserve.autoscaling_policy: the controller decides: leave the policy out for Ray Serve's formula, or "
    "name a function or a Prometheus query by x-serve.autoscale.policy"
)
