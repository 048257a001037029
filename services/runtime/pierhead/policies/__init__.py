"""Which replica a call goes to. `policy.py` says what a policy is: the protocols here are for policies of users."""

from pierhead.policies.policy import Candidate, Policy, RoutedCall

__all__ = ["Candidate", "Policy", "RoutedCall"]
