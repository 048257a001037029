"""Returns its inputs: text, and half precision."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(name + "_out", pb_utils.get_input_tensor_by_name(request, name).as_numpy())
                    for name in ("text", "half")
                ]
            )
            for request in requests
        ]
