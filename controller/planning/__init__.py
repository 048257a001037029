"""The parts of a plan, one step of `controller.plan` each. Pure, like it."""
