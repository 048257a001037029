"""Sleeps for as many seconds as the input says; one request at a time, and one more may wait for 0.2 s."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seconds = pb_utils.get_input_tensor_by_name(request, "seconds").as_numpy()
            time.sleep(float(seconds.flat[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("slept", seconds)]))
        return responses
