"""Does not load."""


class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("no weights")
