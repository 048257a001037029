"""Where the replicas of an application live when no container does: the seam `Runner`, and the front before it."""
