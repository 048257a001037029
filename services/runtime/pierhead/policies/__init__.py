"""Policies choose the replica for a call. `policy.py` defines them; users' policies import its protocols from here."""

from pierhead.policies.policy import Candidate, Policy, RoutedCall

__all__ = ["Candidate", "Policy", "RoutedCall"]
