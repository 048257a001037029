"""Decoupled: one response for each value, `delay_ms` apart; -1 is an error."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _answer(self, request):
        sender = request.get_response_sender()
        values, delay = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("values", "delay_ms"))
        for value in values:
            if value == -1:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("-1 was asked for")))
            else:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("value", np.array([value], np.int32))]))
            time.sleep(int(delay[0]) / 1000)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
