"""The sum of two arrays; a negative first number is an exception."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("a", "b"))
            if a.size and a.flat[0] < 0:
                raise ValueError("a: expected a number >= 0")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("sum", a + b)]))
        return responses
