"""`triton.client()`: calls to NVIDIA's Triton Inference Server through a handle, with NumPy arrays.

    from pierhead import triton

    models = triton.client("triton")
    reply = await models.infer("add", {"a": a, "b": b})     # {"sum": array}
    async for part in models.stream("repeat", {"values": values}):
        ...

Needs the extra `triton` (`pip install pierhead[triton]`): the messages, the stub and the dtypes are tritonclient's. The
channel is a handle's, so the choice of the replica, retries before work, deadlines, cancellation and metrics are those
of every handle.

inference.py    the client                      errors.py    what its errors mean
messages.py     arrays in messages, in memory   cuda.py      inputs in GPU memory
connection.py   one server, and its models      regions.py   memory that the server has mapped
"""

from pierhead.triton.inference import Client, client

__all__ = ["Client", "client"]
